"""Shrink a finding: leave out chunks, then smaller ones, as long as the finding is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from embarcadero_proof.fuzz.archive import MENDED, pack, unpack

ATTEMPTS_MAX: Final = 600

Still = Callable[[bytes], bool]


def shrunk(data: bytes, still: Still, archive: bool = False, attempts: int = ATTEMPTS_MAX) -> bytes:
    """Return the smallest input found for which `still` holds; it holds for `data`."""
    remaining = [attempts]

    def asked(candidate: bytes) -> bool:
        if remaining[0] <= 0:
            return False
        remaining[0] -= 1
        return still(candidate)

    return _files(data, asked) if archive else _bytes(data, asked)


def _files(data: bytes, still: Still) -> bytes:
    files = unpack(data)
    for name in [name for name in files if name != MENDED]:  # without this mark the target would expect true records
        fewer = {other: content for other, content in files.items() if other != name}
        if still(pack(fewer)):
            files = fewer
    for name in list(files):
        files[name] = _bytes(files[name], lambda content, name=name: still(pack({**files, name: content})))  # type: ignore[misc]
    return pack(files)


def _bytes(data: bytes, still: Still) -> bytes:
    size = len(data) // 2
    while size >= 1:
        at = 0
        while at < len(data):
            candidate = data[:at] + data[at + size :]
            if still(candidate):
                data = candidate
            else:
                at += size
        size //= 2
    return data
