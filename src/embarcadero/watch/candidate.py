"""A sequencer candidate as the endpoint sees it: the sequencer of an epoch, or one that stands by."""

from __future__ import annotations

from embarcadero.env import Clock
from embarcadero.sequencer.state import Sequencer
from embarcadero.watch.page import Page
from embarcadero.watch.roles import WatchedSequencer


class WatchedCandidate:
    """One candidate over all its reigns."""

    def __init__(self, number: int, clock: Clock) -> None:
        self._number, self._clock = number, clock
        self._reign: WatchedSequencer | None = None

    @property
    def sequencer(self) -> Sequencer | None:
        """The sequencer that it is; None while it stands by."""
        return None if self._reign is None else self._reign.sequencer

    @sequencer.setter
    def sequencer(self, sequencer: Sequencer | None) -> None:
        self._reign = None if sequencer is None else WatchedSequencer(sequencer, self._clock)

    @property
    def name(self) -> str:
        """`sequencer-<epoch>`, or `standby-<candidate>`."""
        return f"standby-{self._number}" if self._reign is None else self._reign.name

    async def unready(self) -> str:
        """One that stands by is ready for that."""
        return "" if self._reign is None else await self._reign.unready()

    def write(self, page: Page) -> None:
        """Whether it stands by; everything of a sequencer if it is one."""
        page.put("embarcadero_sequencer_standby", int(self._reign is None), candidate=self._number)
        if self._reign is not None:
            self._reign.write(page)
