"""Where nodes say how they can be watched, and how they left: a small file a process in the cluster's folder.

    <data_dir>/watch/<node>.json
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """One node process. `left`: for each of its brokers that ended in order, what it settled and what it could not."""

    roles: str
    pid: int
    host: str
    port: int
    left: dict[str, dict[str, int]] | None = None

    @property
    def address(self) -> str:
        """host:port of its metrics; empty if it has none."""
        if not self.port:
            return ""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """Where its metrics are."""
        return f"http://{self.address}/metrics"

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self.left is None and Path(f"/proc/{self.pid}").exists()


_DECODER: Final = msgspec.json.Decoder(Place)


class Places:
    """All of them, of one cluster."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "watch"

    def write(self, place: Place) -> None:
        """Replace a node's file, whole."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{place.roles.replace(':', '-').replace(',', '+')[:100]}.json"
        hidden = path.with_suffix(f".{os.getpid()}.new")
        hidden.write_bytes(msgspec.json.encode(place))
        hidden.replace(path)

    def clear(self) -> None:
        """Forget those of an earlier run."""
        for path in self._folder.glob("*"):
            path.unlink(missing_ok=True)

    def read(self) -> list[Place]:
        """All nodes that ever told, by role; files that make no sense are left out."""
        found = []
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
                found.append(_DECODER.decode(path.read_bytes()))
        return found
