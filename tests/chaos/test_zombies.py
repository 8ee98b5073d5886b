"""Real processes that stop at a step, are replaced and go on, change nothing. `chaos zombies` does all steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from embarcadero.chaos.zombies import NOT_HERE, WAYS, chosen, run_case
from embarcadero.errors import BadValue
from embarcadero.steps import Step


@pytest.mark.timeout(300)
@pytest.mark.parametrize("step", [Step.TAKEOVER_DECIDED, Step.ACK_CHECKED], ids=lambda step: step.value)
def test_a_zombie_at_a_step_changes_nothing(step: Step, tmp_path: Path) -> None:
    """Stopped there past every lease, replaced, continued: all that was acked or read is there, once, in its place."""
    case = run_case(step, tmp_path)
    assert case.problems == []
    assert case.stopped


def test_steps_are_chosen_by_name_or_group() -> None:
    """All but those that only the simulator gets to, one, a group; a name that is none is an error."""
    assert set(chosen([])) == set(Step) - NOT_HERE
    assert chosen(["ack.loaded"]) == [Step.ACK_LOADED]
    assert {step.value.partition(".")[0] for step in chosen(["seal", "count"])} == {"seal", "count"}
    with pytest.raises(BadValue):
        chosen(["seal", "ack.lodaed"])


def test_every_way_leads_to_a_step() -> None:
    """A step that gets another name takes its way with it."""
    assert not [start for start in WAYS if not any(step.value.startswith(start) for step in Step)]
