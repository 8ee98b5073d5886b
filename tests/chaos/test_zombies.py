"""Real processes that stop at a step, are replaced and go on, change nothing. `chaos zombies` does all steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from embarcadero.errors import BadValue
from embarcadero.placement.directory import Directory
from embarcadero.steps import Step
from embarcadero_proof.chaos import zombies
from embarcadero_proof.chaos.zombies import NOT_HERE, WAYS, Stage, chosen, run_case
from tests.placement.worlds import directory_with


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


class Nobody(Stage):
    """Where nobody takes anybody's place, or everybody has left it already."""

    known: Directory
    newest = -1

    @contextmanager
    def directory(self) -> Iterator[Directory]:
        yield self.known

    def stand_in(self, role: str) -> None:
        """It never comes up."""


@pytest.mark.parametrize("role", ["broker:0", "replica:0", "sequencer"])
def test_whoever_is_not_replaced_in_time_was_not_replaced(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that is given for it is no proof; a replica that no range names any more is replaced."""
    monkeypatch.setattr(zombies, "_WAIT_S", 0.05)
    stage = Nobody(tmp_path, Step.ACK_CHECKED)
    stage.known = directory_with(3)
    stage.known.topics.create("t", order=5, replicas=3)
    assert zombies._replace(stage, role) == ""
    stage.known.topics.delete("t")
    assert zombies._replace(stage, "replica:0") == "other replicas"
