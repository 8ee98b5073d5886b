"""Real processes that stop, kill or delay themselves at a named step of the protocol.

    EMBARCADERO_STEP="<role>@<step>:<stop|kill|sleep MS>[:nth]"
    sequencer@takeover.read:stop        broker:1@ack.loaded:kill:3

A supervisor passes its environment to all its nodes, so the value names the role: one role (`broker:1`), or all roles
of a kind (`broker`). Nothing happens until a test creates the file `step.armed` in the cluster's folder. The first
process that then reaches the step for the nth time renames this file to `step.fired-<pid>`. So only one process ever
executes the fault, and the test that armed it knows which one.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final, NamedTuple

from embarcadero.env import NO_STEPS, Steps
from embarcadero.errors import BadConfiguration
from embarcadero.steps import BY_NAME, Step

STEP_VARIABLE: Final = "EMBARCADERO_STEP"
_ARMED: Final = "step.armed"
_FIRED: Final = "step.fired-"
_SLEEP: Final = "sleep "


class StepRequest(NamedTuple):
    """The fault that the variable requests."""

    role: str
    step: Step
    action: str  # "stop", "kill", or "sleep" and how many milliseconds
    nth: int


def parse_request(text: str) -> StepRequest:
    """Parse a request. Raises BadConfiguration."""
    role, at, rest = text.partition("@")
    name, _, rest = rest.partition(":")
    action, _, nth = rest.partition(":")
    sleeps = action.startswith(_SLEEP) and action.removeprefix(_SLEEP).isdigit()
    if not (role and at and name in BY_NAME and (action in {"stop", "kill"} or sleeps) and (not nth or nth.isdigit())):
        raise BadConfiguration(
            f"${STEP_VARIABLE} is {text!r}, which is not a step with a fault",
            "use <role>@<step>:<stop|kill|sleep MS>[:nth], with a step of embarcadero/steps.py",
        )
    return StepRequest(role, BY_NAME[name], action, int(nth or 1))


def arm(folder: Path) -> None:
    """Allow the requested fault from now on."""
    (folder / _ARMED).touch()


def fired(folder: Path) -> int | None:
    """Return the process that executed the fault; None while there is none."""
    found = next(iter(folder.glob(f"{_FIRED}*")), None)
    return None if found is None else int(found.name.removeprefix(_FIRED))


class RequestedSteps:
    """The steps of one role with a requested fault."""

    def __init__(self, request: StepRequest, folder: Path) -> None:
        self._request, self._folder, self._reached = request, folder, 0

    def at(self, name: str) -> None:
        armed = self._folder / _ARMED
        if name != self._request.step or not armed.exists():
            return
        self._reached += 1
        if self._reached < self._request.nth:
            return
        try:
            armed.rename(self._folder / f"{_FIRED}{os.getpid()}")
        except FileNotFoundError:
            return  # another process was first
        if self._request.action.startswith(_SLEEP):
            time.sleep(int(self._request.action.removeprefix(_SLEEP)) / 1_000)
        else:
            os.kill(os.getpid(), signal.SIGSTOP if self._request.action == "stop" else signal.SIGKILL)


def steps_of(role: str, folder: Path) -> Steps:
    """Return the steps of a role of this process: without faults, unless the environment requests one."""
    text = os.environ.get(STEP_VARIABLE)
    if not text:
        return NO_STEPS
    request = parse_request(text)
    return RequestedSteps(request, folder) if request.role in {role, role.partition(":")[0]} else NO_STEPS
