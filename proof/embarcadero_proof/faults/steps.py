"""Real processes that stop, kill or delay themselves at a named step of the protocol.

    EMBARCADERO_STEP="<role>@<step>:<stop|kill|sleep MS>[:nth]"
    sequencer@takeover.read:stop        broker:1@ack.loaded:kill:3

A supervisor hands its environment on to all its nodes, so the value names the role: that very one (`broker:1`), or any
of its kind (`broker`). Nothing happens until a test makes the file `step.armed` in the cluster's folder. The process
that gets to the step for the nth time from then on takes that file away (`step.fired-<pid>`): so only one does, ever,
not those that come after it, and the test that armed it knows which.
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


class Wish(NamedTuple):
    """What the variable asks for."""

    role: str
    step: Step
    action: str  # "stop", "kill", or "sleep" and how many milliseconds
    nth: int


def parse_wish(text: str) -> Wish:
    """The wish in a text. Raises BadConfiguration."""
    role, at, rest = text.partition("@")
    name, _, rest = rest.partition(":")
    action, _, nth = rest.partition(":")
    sleeps = action.startswith(_SLEEP) and action.removeprefix(_SLEEP).isdigit()
    if not (role and at and name in BY_NAME and (action in {"stop", "kill"} or sleeps) and (not nth or nth.isdigit())):
        raise BadConfiguration(
            f"${STEP_VARIABLE} is {text!r}",
            "use <role>@<step>:<stop|kill|sleep MS>[:nth], with a step of embarcadero/steps.py",
        )
    return Wish(role, BY_NAME[name], action, int(nth or 1))


def arm(folder: Path) -> None:
    """Let the wish come true from now on."""
    (folder / _ARMED).touch()


def fired(folder: Path) -> int | None:
    """The process that got there; None while none did."""
    found = next(iter(folder.glob(f"{_FIRED}*")), None)
    return None if found is None else int(found.name.removeprefix(_FIRED))


class WishedSteps:
    """The steps of one role that has a wish."""

    def __init__(self, wish: Wish, folder: Path) -> None:
        self._wish, self._folder, self._reached = wish, folder, 0

    def at(self, name: str) -> None:
        armed = self._folder / _ARMED
        if name != self._wish.step or not armed.exists():
            return
        self._reached += 1
        if self._reached < self._wish.nth:
            return
        try:
            armed.rename(self._folder / f"{_FIRED}{os.getpid()}")
        except FileNotFoundError:
            return  # another one was first
        if self._wish.action.startswith(_SLEEP):
            time.sleep(int(self._wish.action.removeprefix(_SLEEP)) / 1_000)
        else:
            os.kill(os.getpid(), signal.SIGSTOP if self._wish.action == "stop" else signal.SIGKILL)


def steps_of(role: str, folder: Path) -> Steps:
    """The steps of a role of this process: nothing happens there, unless the environment wishes for it."""
    text = os.environ.get(STEP_VARIABLE)
    if not text:
        return NO_STEPS
    wish = parse_wish(text)
    return WishedSteps(wish, folder) if wish.role in {role, role.partition(":")[0]} else NO_STEPS
