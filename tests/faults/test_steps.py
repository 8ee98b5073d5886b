"""A process injects a fault at a step only on request, only once, and in only one process of many."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embarcadero.env import NO_STEPS
from embarcadero.errors import BadConfiguration
from embarcadero.steps import Step
from embarcadero_proof.faults.steps import (
    STEP_VARIABLE,
    RequestedSteps,
    StepRequest,
    arm,
    fired,
    parse_request,
    steps_of,
)


def test_a_request_is_read() -> None:
    """Role, step, fault, and the number of the occurrence; a role may have a number."""
    assert parse_request("sequencer@takeover.read:stop") == StepRequest("sequencer", Step.TAKEOVER_READ, "stop", 1)
    assert parse_request("broker:1@ack.loaded:kill:3") == StepRequest("broker:1", Step.ACK_LOADED, "kill", 3)
    assert parse_request("replica@replica.line:sleep 20") == StepRequest("replica", Step.REPLICA_LINE, "sleep 20", 1)


@pytest.mark.parametrize(
    "text",
    ["ack.loaded:stop", "broker@ack.lodaed:stop", "broker@ack.loaded", "broker@ack.loaded:stop:x", "@ack.loaded:stop",
     "broker@ack.loaded:sleep", "broker@ack.loaded:dance"],
)  # fmt: skip
def test_an_invalid_request_is_an_error(text: str) -> None:
    """A typo does not pass for a test in which nothing happened."""
    with pytest.raises(BadConfiguration):
        parse_request(text)


def test_it_happens_once_and_only_when_armed(tmp_path: Path) -> None:
    """Not before it is armed, not at another step, at the nth time from then on; then never again, in any process."""
    request = StepRequest("broker", Step.ACK_LOADED, "sleep 0", 2)
    first, second = RequestedSteps(request, tmp_path), RequestedSteps(request, tmp_path)
    for _ in range(3):
        first.at(Step.ACK_LOADED)
    arm(tmp_path)
    first.at(Step.ACK_CHECKED)
    first.at(Step.ACK_LOADED)
    second.at(Step.ACK_LOADED)
    assert fired(tmp_path) is None
    first.at(Step.ACK_LOADED)
    assert fired(tmp_path) == os.getpid()
    for _ in range(3):
        second.at(Step.ACK_LOADED)
    assert len(list(tmp_path.iterdir())) == 1


def test_only_the_named_role_has_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes have the same environment: the value names its target, one role or all of a kind."""
    assert steps_of("broker:1", tmp_path) is NO_STEPS
    monkeypatch.setenv(STEP_VARIABLE, "broker:1@ack.loaded:stop")
    assert isinstance(steps_of("broker:1", tmp_path), RequestedSteps)
    assert steps_of("broker:0", tmp_path) is NO_STEPS
    monkeypatch.setenv(STEP_VARIABLE, "sequencer@takeover.read:stop")
    assert isinstance(steps_of("sequencer:1", tmp_path), RequestedSteps)
    assert steps_of("broker:1", tmp_path) is NO_STEPS
