"""The store: a few thousand small values, changed only by transactions. One interface for every backend.

A value has the revision of the transaction that last wrote it; revisions grow with every transaction that changed
something. A transaction names the revisions its decision rests on and happens only if all of them still hold. That is
the model of etcd (mod revisions, compare-then-put): a cluster of several hosts can use it behind the same lines.

A lease says that somebody is still there. Values written under one are gone, for every reader, from the moment it ends:
when its time is over without `keep_alive`, when it is revoked, or when its holder's process is seen to be gone by a
store that can see processes. An ended lease never comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

ABSENT = 0
"""The revision of a key that has no value."""

NO_LEASE = 0
"""The lease of a value that stays until it is deleted."""

_REST_US: Final = 100_000


def rested_us(began_us: int, now_us: int) -> int:
    """When to ask a store again that has just failed one who asked it at `began_us`.

    It is left alone for a moment, and for as long as it has kept that one waiting: there is other work to do.
    """
    return now_us + _REST_US + now_us - began_us


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
    """Write a value; under a lease, it stays only as long as the lease.

    `volatile`: it means nothing once the machine has lost its power, so nobody need wait for a disk. A transaction of
    such writes only may be lost then, with all that came after it; never what came before.
    """

    key: str
    value: bytes
    lease: int = NO_LEASE
    volatile: bool = False


class Delete(NamedTuple):
    """Remove a value; removing what is absent is fine."""

    key: str
    volatile: bool = False


Write = Put | Delete


class Outline(NamedTuple):
    """How many values there are of some kind, and the newest revision among them."""

    values: int
    revision: int


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
        """If all checks hold, do all writes at one new revision and return True; else change nothing, return False.

        A write under a lease that has ended counts as a check that does not hold.
        """
        ...

    def revision(self) -> int:
        """The revision of the newest transaction that changed something. Cheap enough to ask in every poll."""
        ...

    def outline(self, but: Sequence[str]) -> Outline:
        """Outline the values whose keys begin with none of `but`.

        While that is the same, so are these values: writing one has a revision that is newer than all, and deleting
        some without writing any leaves fewer. Values of ended leases count until they are deleted.
        """
        ...

    def grant(self, ttl_s: float, pid: int = 0) -> int:
        """A new lease; its number never comes again. It ends `ttl_s` (may be infinite) after the last `keep_alive`.

        `pid`: the holder, if it is a process that this store may be able to see; 0: nobody in particular.
        """
        ...

    def keep_alive(self, lease: int) -> bool:
        """The holder is there: its time begins anew. False when the lease has ended; then it has ended for good."""
        ...

    def revoke(self, lease: int) -> None:
        """End a lease, and with it its values. Ending one that has ended is fine."""
        ...

    def expire(self) -> bool:
        """Delete the values of leases that ended unseen, at a new revision, so that watchers notice; True if any.

        Reads hide such values anyway, and every transaction that writes begins with this.
        """
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...
