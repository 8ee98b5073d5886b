"""Epochs in the directory: numbers for sequencers, of which only the newest handed out may start or decide.

Epochs end with the memory that they speak of: after a loss of power the next generation begins without them. So a
takeover waits for no disk; whatever a sequencer decides later that must outlast its machine is synced, and what came
before is then, too.
"""

from __future__ import annotations

import msgspec

from embarcadero.errors import TooMany
from embarcadero.limits import EPOCHS_AHEAD_MAX, EPOCHS_MAX
from embarcadero.placement.decisions import Decisions, Plan
from embarcadero.placement.records import Epochs, Start

STARTS_KEPT = 16
"""Ends of this many started epochs are kept for those who are late to learn of them."""


class EpochNumbers(Decisions):
    """The directory's part about epochs."""

    def next_epoch(self, superseded: int | None = None) -> int:
        """Hand out the next epoch. Few run ahead of the last started one, since everybody checks that many lines.

        `superseded` is an epoch for which the caller saw the line of a later one open, among those that everybody
        checks. If that is the last started one, nobody acts on its word any more, and more may run ahead.
        """

        return self._decide(lambda plan: self._hand_out(plan, superseded))

    @staticmethod
    def _hand_out(plan: Plan, superseded: int | None) -> int:
        epochs = plan.read("epochs", Epochs) or Epochs()
        epoch = epochs.handed_out + 1
        if epoch > epochs.started + EPOCHS_AHEAD_MAX and superseded != epochs.started:
            raise TooMany(
                f"{EPOCHS_AHEAD_MAX} sequencers took an epoch after {epochs.started} and none of them started it",
                "see the sequencers' logs, then restart the cluster",
            )
        if epoch >= EPOCHS_MAX - 1:  # the table's last line stays empty: whoever acts looks at the one after its own
            raise TooMany(f"all epochs of this fabric, {EPOCHS_MAX - 2}, are used", "restart the cluster")
        plan.put("epochs", msgspec.structs.replace(epochs, handed_out=epoch), volatile=True)
        return epoch

    def start_epoch(self, epoch: int, ends: dict[int, int]) -> bool:
        """Start an epoch at these ends (lane -> index). Unless it is the newest handed out: False, nothing changes."""

        def plan_it(plan: Plan) -> bool:
            epochs = plan.read("epochs", Epochs) or Epochs()
            if not self._reigns(plan, epoch) or epoch <= epochs.started:
                return False
            plan.put("epochs", msgspec.structs.replace(epochs, started=epoch), volatile=True)
            plan.put(f"starts/{epoch:010}", Start(ends), volatile=True)
            for key, _ in list(plan.list("starts/", Start))[: -STARTS_KEPT + 1]:
                plan.delete(key, volatile=True)
            return True

        return self._decide(plan_it)

    def started_epoch(self) -> int:
        """The newest started epoch; 0 when none has started."""
        return (self._one("epochs", Epochs) or Epochs()).started

    def newest_epochs(self) -> Epochs:
        """The newest epoch that was handed out, and the newest started one."""
        return self._one("epochs", Epochs) or Epochs()

    def generation_holds(self) -> bool:
        """Whether the fabric of this directory's generation is still the cluster's."""
        return self.newest_epochs().generation == self._cluster.generation

    def epoch_ends(self, epoch: int) -> dict[int, int] | None:
        """Where each lane ended when this epoch started; None if it never started, or long ago."""
        start = self._one(f"starts/{epoch:010}", Start)
        return None if start is None else start.ends
