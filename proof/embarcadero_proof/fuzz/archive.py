"""An input that is a folder: files by path, packed into bytes. Files are changed, dropped, renamed and swapped."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Final

from embarcadero_proof.fuzz.mutate import mutated
from embarcadero_proof.fuzz.target import INPUT_BYTES_MAX, Inputs, Mutate

Files = dict[str, bytes]
MendFile = Callable[[str, bytes, Random], bytes]

MENDED: Final = "mended"
"""A file of this name marks corrected checksums: the contents of such a folder are valid, and perhaps not true."""
_LENGTHS: Final = struct.Struct("<HI")


def pack(files: Files) -> bytes:
    """Pack all files into bytes."""
    parts = []
    for name, data in files.items():
        path = name.encode()
        parts += [_LENGTHS.pack(len(path), len(data)), path, data]
    return b"".join(parts)


def unpack(data: bytes) -> Files:
    """Unpack files, as far as they are whole and have valid names."""
    files: Files = {}
    at = 0
    while at + _LENGTHS.size <= len(data):
        name_bytes, size = _LENGTHS.unpack_from(data, at)
        at += _LENGTHS.size
        name = data[at : at + name_bytes].decode(errors="replace")
        files[name] = data[at + name_bytes : at + name_bytes + size]
        at += name_bytes + size
    return {name: content for name, content in files.items() if _is_valid(name)}


def _is_valid(name: str) -> bool:
    parts = name.split("/")
    return all(part and part.isprintable() and part not in {".", ".."} for part in parts)


def archive_mutation(mend: MendFile | None = None) -> Mutate:
    """Return a mutation of folders. `mend` corrects the checksums of a changed file; the folder is then marked."""

    def mutate(data: bytes, rng: Random, pool: Inputs) -> bytes:
        files = unpack(data)
        for _ in range(1 + (rng.random() < 0.4) + (rng.random() < 0.1)):
            _change(files, rng, pool, mend)
        return pack(files) if sum(map(len, files.values())) <= INPUT_BYTES_MAX else data

    return mutate


def _change(files: Files, rng: Random, pool: Inputs, mend: MendFile | None) -> None:
    names = [name for name in files if name != MENDED]
    if not names:
        return
    name = rng.choice(names)
    choice = rng.random()
    if choice < 0.06:
        del files[name]
    elif choice < 0.1:
        files[rng.choice(names)] = files.pop(name)
    elif choice < 0.14:
        files[name] = files[rng.choice(names)]
    elif choice < 0.2:
        other = unpack(rng.choice(pool))
        files[name] = other.get(name, files[name])
        if MENDED in other:
            files[MENDED] = b""
    else:
        others = [files[other] for other in names]
        files[name] = mutated(files[name], rng, others)
        if mend is not None and rng.random() < 0.4:
            files[name] = mend(name, files[name], rng)
            files[MENDED] = b""
