"""Names of a write in the target's log, and the numbers that its named sessions carry.

`spark/<write>/decided`     (epoch << DIGEST_BITS) + digest of the manifest that was decided for that epoch.
`spark/<write>/data`        the session of the published batches: batch n of an epoch has the sequence
                            (epoch << BATCHES_BITS) + n. Beyond an epoch's sequences, that epoch is done.
`spark/<write>/run/<run>`   the newest epoch, plus 1, that a run of the driver has tried to commit.
`spark/<write>/routed`      of a write into several topics: the session of the batches in each of them, with the same
                            sequences. `decided` and `data` are in the log of its home, the hidden topic ROUTED_TOPIC.

Each number only grows. They end with their sessions: after the topic's `session_ttl_s` without use.
"""

from __future__ import annotations

from typing import NamedTuple

from embarcadero.limits import STAGED_BATCHES_BITS, STAGED_DIGEST_BITS


class Decision(NamedTuple):
    """The newest decision of a write: which epoch, and the digest of its manifest; digest 0: there is none."""

    epoch: int
    digest: int

    @property
    def number(self) -> int:
        """The sequence that stands for it."""
        return (self.epoch << STAGED_DIGEST_BITS) + self.digest

    @classmethod
    def of(cls, number: int) -> Decision:
        """The decision for which a sequence stands."""
        return cls(number >> STAGED_DIGEST_BITS, number & ((1 << STAGED_DIGEST_BITS) - 1))


def decided_name(write: str) -> str:
    """Name of the session whose sequence is the newest decision."""
    return f"spark/{write}/decided"


def data_name(write: str) -> str:
    """Name of the session of the published batches."""
    return f"spark/{write}/data"


def routed_name(write: str) -> str:
    """Name of the session of the batches of a write into several topics."""
    return f"spark/{write}/routed"


def run_name(write: str, run: str) -> str:
    """Name of the session whose sequence tells how far a run of the driver is."""
    return f"spark/{write}/run/{run}"


def first_sequence(epoch: int) -> int:
    """The sequence of the first batch of an epoch; of the next epoch, the place at which this one is done."""
    return epoch << STAGED_BATCHES_BITS
