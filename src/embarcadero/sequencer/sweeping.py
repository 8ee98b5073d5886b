"""Regions that nobody needs any more: of epochs before our predecessor's, and of incarnations that are forgotten.

Whoever stops a role for good removes its regions; but one that sleeps may make another of them when it wakes up, long
after. So the sequencer that reigns looks again and again, beside its rounds. In one generation of the fabric names are
never used again, so it does not matter when that happens, or who reigns then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from embarcadero.env import Steps, Workers
from embarcadero.fabric.names import epoch_of, is_incarnation, is_replica, writer_of
from embarcadero.fabric.region import Fabric
from embarcadero.placement.directory import Directory
from embarcadero.steps import Step

_FIRST_US: Final = 300_000
"""After a takeover publishers come first: what earlier epochs left keeps its memory until then."""
_EVERY_US: Final = 2_000_000


class Sweeper:
    """Looks for what is left and removes it. `look` now and then; it knows when."""

    def __init__(
        self, fabric: Fabric, directory: Directory, workers: Workers, steps: Steps, epoch: int, earlier: int,
        now_us: int,
    ) -> None:  # fmt: skip
        """`earlier`: our predecessor, whose regions somebody may still read."""
        self._fabric, self._directory, self._workers, self._steps = fabric, directory, workers, steps
        self._epoch, self._earlier = epoch, earlier
        self._due_us = now_us + _FIRST_US
        self._names: list[str] | None = None  # that there were at the last look, until they are judged
        self._busy = False

    def look(self, now_us: int) -> None:
        """See what there is; judge what was seen. Asks the store."""
        if now_us >= self._due_us and not self._busy:
            self._due_us = now_us + _EVERY_US
            self._beside(self._fabric.names, self._seen)
        if self._names is not None:
            left = self._left(self._names)
            self._names = None
            self._beside(lambda: self._remove(left), lambda _: self._steps.at(Step.TAKEOVER_SWEPT))

    def _beside(self, job: Callable[[], object], done: Callable[[object], None]) -> None:
        self._busy = True

        def ended(result: object) -> None:
            self._busy = False
            done(result)

        self._workers.run(job, ended)

    def _seen(self, names: object) -> None:
        if isinstance(names, list):
            self._names = names

    def _left(self, names: list[str]) -> list[str]:
        """Of these names those that are of no use. Who makes a region is in the store before it, so we ask after it."""
        members, replicas = self._directory.members(), self._directory.replicas()
        prefixes = {member.region_prefix for member in members} | {member.ref.region_prefix for member in replicas}
        left = [name for name in names if self._is_left(writer_of(name), prefixes)]
        if any(is_replica(name) for name in left):  # lines that an open range names count, whoever is known
            open_ = [range_ for range_ in self._directory.ranges() if range_.open]
            named = {ref.region_prefix for range_ in open_ for ref in range_.replicas}
            left = [name for name in left if writer_of(name) not in named]
        return left if self._directory.generation_holds() else []

    def _is_left(self, owner: str, prefixes: set[str]) -> bool:
        if (epoch := epoch_of(owner)) is not None:
            return epoch < self._epoch and epoch != self._earlier
        return is_incarnation(owner) and owner not in prefixes

    def _remove(self, names: list[str]) -> None:
        for name in names:
            self._fabric.remove(name)
