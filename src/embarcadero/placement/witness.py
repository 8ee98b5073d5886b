"""A witness of a store's newest revision, in a small file beside it.

A store that keeps a log of its newest changes takes a damaged log for one that ends there, and goes on without what
came after: ceilings would be lower than before, and positions be handed out twice. The witness is written after each
commit. It may be a little behind, never ahead, so a store that is behind its witness has lost something.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path
from zlib import crc32

_REVISION = struct.Struct("<Q")
_RECORD_BYTES = _REVISION.size + 4


class Witness:
    """The file of one store. Anybody who commits writes it; nobody waits for the disk because of it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def read(self) -> int:
        """The newest revision that was noted; 0 if none was, or the note makes no sense."""
        record = os.pread(self._file, _RECORD_BYTES, 0)
        number, check = record[: _REVISION.size], record[_REVISION.size :]
        right = len(record) == _RECORD_BYTES and check == crc32(number).to_bytes(4, "little")
        return int(_REVISION.unpack(number)[0]) if right else 0

    def write(self, revision: int) -> None:
        """Note a revision that is committed. Without the note nothing is wrong: the commit holds."""
        number = _REVISION.pack(revision)
        with contextlib.suppress(OSError):
            os.pwrite(self._file, number + crc32(number).to_bytes(4, "little"), 0)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)
