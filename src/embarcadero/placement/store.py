"""The store: a few thousand small values, changed only by transactions. One interface for every backend.

A value has the revision of the transaction that last wrote it; revisions grow with every transaction that changed
something. A transaction names the revisions its decision rests on and happens only if all of them still hold. That is
the model of etcd (mod revisions, compare-then-put): a cluster of several hosts can use it behind the same lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

ABSENT = 0
"""The revision of a key that has no value."""


class Item(NamedTuple):
    """A key's value, and the revision of the transaction that wrote it."""

    key: str
    value: bytes
    revision: int


class Check(NamedTuple):
    """A condition of a transaction: the key still has this revision (ABSENT: no value)."""

    key: str
    revision: int


class Put(NamedTuple):
    """Write a value."""

    key: str
    value: bytes


class Delete(NamedTuple):
    """Remove a value; removing what is absent is fine."""

    key: str


Write = Put | Delete
Items = list[Item]


class Store(Protocol):
    """What the directory needs from a backend. Safe to call from several threads."""

    def get(self, key: str) -> Item | None:
        """The newest committed value of a key."""
        ...

    def list(self, prefix: str) -> Items:
        """All values whose key starts with `prefix`, sorted by key, as of one moment."""
        ...

    def transact(self, checks: Sequence[Check], writes: Sequence[Write]) -> bool:
        """If all checks hold, do all writes at one new revision and return True; else change nothing, return False."""
        ...

    def revision(self) -> int:
        """The revision of the newest transaction that changed something. Cheap enough to ask in every poll."""
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...
