"""What all parts of one leadership share: the epoch, its clock, its way to the store, and whether it is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from embarcadero.config import FabricSizes
from embarcadero.config.table import SequencerKeys as Settings
from embarcadero.env import Env
from embarcadero.errors import LATER, BadRegion
from embarcadero.fabric.layout import SEQUENCER_FRONTIERS_BYTES, RegionKind
from embarcadero.fabric.leader import EpochTable
from embarcadero.fabric.region import EPOCHS_REGION, Fabric, Shape, frontiers_region
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import rested_us
from embarcadero.sequencer.ranges.keeper import SequencerCounters
from embarcadero.steps import Step

_STORE_TOLD_US: Final = 60_000_000
"""Failures of the store that follow each other more closely are one to the journal."""

T = TypeVar("T")


class Leadership:
    """One epoch that this process leads, or is about to lead. `deposed` is set when a later one has begun."""

    def __init__(
        self,
        env: Env,
        fabric: Fabric,
        directory: Directory,
        sizes: FabricSizes,
        settings: Settings,
        epoch: int | None,
    ) -> None:
        """`epoch`: one that was won in an election; without, the next one is taken, whoever leads."""
        self.env, self.fabric, self.directory = env, fabric, directory
        self.sizes, self.settings = sizes, settings
        self.deposed = False
        self.problems: list[str] = []  # of rings, for the log
        self.counters = SequencerCounters()
        self.epochs = EpochTable(fabric, fabric.attach(EPOCHS_REGION, writable=True))
        if epoch is None:
            last = directory.elections.started_epoch()
            epoch = directory.elections.next_epoch(last if self.epochs.superseded(last) else None)
        self.epoch = epoch
        env.steps.at(Step.TAKEOVER_EPOCH_GIVEN)
        if epoch > directory.elections.started_epoch() + 1:
            self.epochs.open(epoch)  # others came before us and never started: if we end like them, more may follow
        self.frontiers = fabric.create(
            frontiers_region(epoch), Shape(RegionKind.SEQUENCER_FRONTIERS, SEQUENCER_FRONTIERS_BYTES)
        )
        self.now_us, self.wall_us = env.clock.now_us(), env.clock.wall_us()
        self.began_us = self.now_us
        self._store_us = self.now_us - _STORE_TOLD_US  # until then the store is not asked: it has failed

    def tick(self) -> None:
        """Look at the clock. What is done until the next tick happens at this time."""
        self.now_us, self.wall_us = self.env.clock.now_us(), self.env.clock.wall_us()

    def tick_monotonic(self) -> None:
        """The same for time-outs only: no entry is written meanwhile."""
        self.now_us = self.env.clock.now_us()

    # --- the end ------------------------------------------------------------------------------------------------------
    def is_over(self) -> bool:
        """Whether a later epoch is open: then nothing may be done any more."""
        if self.deposed or self.epochs.superseded(self.epoch):
            self.deposed = True
        return self.deposed

    def depose(self) -> None:
        """The store says that a later epoch was handed out."""
        self.deposed = True

    def unless_deposed(self, part: Callable[[], T], otherwise: T) -> T:
        """Do a part. A region that is gone because a successor needs it no more deposes us, and is no error."""
        try:
            return part()
        except BadRegion:
            if not self.epochs.superseded(self.epoch):
                raise
            self.deposed = True
            return otherwise

    # --- the store ----------------------------------------------------------------------------------------------------
    def ask_store(self, part: Callable[[], object]) -> bool:
        """Do what needs the store. False if it fails, or has just failed: it is done later, and ordering goes on.

        Each part leaves things so that it can be done again.
        """
        if self.store_is_failing:
            return False
        began_us = self.env.clock.now_us()
        try:
            part()
        except LATER as error:
            now_us = self.env.clock.now_us()
            if now_us - self._store_us >= _STORE_TOLD_US:
                self.env.journal.warn("store fails", reason=error.message, then="what needs it waits")
            self._store_us = rested_us(began_us, now_us)
            return False
        return True

    @property
    def store_is_failing(self) -> bool:
        """Whether the store has just failed, and is not asked."""
        return self.now_us < self._store_us
