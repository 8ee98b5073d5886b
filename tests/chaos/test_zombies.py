"""Real processes that stop at a step, are replaced and continue, have no effect. `chaos zombies` covers all steps."""

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
def test_a_zombie_at_a_step_has_no_effect(step: Step, tmp_path: Path) -> None:
    """Stopped there beyond every lease, replaced, continued: all acked or read records are there, once, in position."""
    case = run_case(step, tmp_path)
    assert case.problems == []
    assert case.stopped


def test_steps_are_chosen_by_name_or_group() -> None:
    """All except those that only the simulator reaches, one, a group; an unknown name is an error."""
    assert set(chosen([])) == set(Step) - NOT_HERE
    assert chosen(["ack.loaded"]) == [Step.ACK_LOADED]
    assert {step.value.partition(".")[0] for step in chosen(["seal", "count"])} == {"seal", "count"}
    with pytest.raises(BadValue):
        chosen(["seal", "ack.lodaed"])


def test_every_way_leads_to_a_step() -> None:
    """A step that is renamed takes its way with it."""
    assert not [start for start in WAYS if not any(step.value.startswith(start) for step in Step)]


class Nobody(Stage):
    """A cluster in which no role is replaced, or every role has left already."""

    known: Directory
    newest = -1

    @contextmanager
    def directory(self) -> Iterator[Directory]:
        yield self.known

    def stand_in(self, role: str) -> None:
        """It never comes up."""


@pytest.mark.parametrize("role", ["broker:0", "replica:0", "sequencer"])
def test_a_role_that_is_not_replaced_in_time_was_not_replaced(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elapsed time is no proof; a replica that no range names any more is replaced."""
    monkeypatch.setattr(zombies, "_WAIT_S", 0.05)
    stage = Nobody(tmp_path, Step.ACK_CHECKED)
    stage.known = directory_with(3)
    stage.known.topics.create("t", order=5, replicas=3)
    assert zombies._replace(stage, role) == ""
    stage.known.topics.delete("t")
    assert zombies._replace(stage, "replica:0") == "other replicas"
