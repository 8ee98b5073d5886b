"""A store in the memory of one process: for the simulator and for tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from embarcadero.placement.store import ABSENT, Check, Item, Items, Put, Write


class MemoryStore:
    """Values in a dict under a lock."""

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._revision = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> Item | None:
        with self._lock:
            return self._items.get(key)

    def list(self, prefix: str) -> Items:
        with self._lock:
            return [self._items[key] for key in sorted(self._items) if key.startswith(prefix)]

    def transact(self, checks: Sequence[Check], writes: Sequence[Write]) -> bool:
        with self._lock:
            for key, revision in checks:
                item = self._items.get(key)
                if (item.revision if item else ABSENT) != revision:
                    return False
            if not writes:
                return True
            self._revision += 1
            for write in writes:
                if isinstance(write, Put):
                    self._items[write.key] = Item(write.key, write.value, self._revision)
                else:
                    self._items.pop(write.key, None)
            return True

    def revision(self) -> int:
        return self._revision

    def close(self) -> None:
        pass
