"""What a broker answers to jobs that write the tables of topics: the store decides."""

from __future__ import annotations

from embarcadero.errors import Deposed
from embarcadero.placement.directory import Directory
from embarcadero.wire import messages as m

TierQuestion = m.OpenTier | m.AdvanceTier | m.KeepTier | m.CloseTier


def answer_tier(directory: Directory, ask: TierQuestion, wall_us: int) -> m.Message:
    """The answer; raises TierBusy or Deposed."""
    match ask:
        case m.OpenTier():
            return m.TierIs(tier=directory.open_tier(ask))
        case m.AdvanceTier():
            return m.TierIs(tier=directory.advance_tier(ask, wall_us))
        case m.KeepTier():
            if not directory.keep_tier(ask.topic, ask.epoch, ask.topic_id):
                raise Deposed(f"epoch {ask.epoch} of the table of {ask.topic!r} is over", "open the tier again")
        case m.CloseTier():
            directory.close_tier(ask.topic, ask.epoch, ask.topic_id)
    return m.Done()
