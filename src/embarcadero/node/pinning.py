"""Where and before whom node processes run: pinned to cores, in turn; whoever reigns before others, if permitted.

Sequencers get the first core of the list (one reigns, the others sleep), brokers the following; replicas begin with the
last one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from embarcadero.errors import BadValue
from embarcadero.node.roles import Role


def parse_cores(text: str) -> list[int]:
    """Cores in a text such as `0,2,3`; empty means no pinning. All must be ours to use."""
    usable = os.sched_getaffinity(0)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    known = {str(core) for core in usable}
    wrong = [part for part in parts if part not in known]
    if wrong:
        raise BadValue(f"no such core: {', '.join(wrong)}", f"usable here: {', '.join(map(str, sorted(usable)))}")
    return [int(part) for part in parts]


def cores_for(roles: Sequence[Role], cores: Sequence[int]) -> set[int]:
    """The cores of a process that hosts these roles."""
    return {cores[_turn(role) % len(cores)] for role in roles}


def _turn(role: Role) -> int:
    if role.replica is not None:
        return -1 - role.replica
    return 0 if role.broker is None else role.broker + 1


def pin(roles: Sequence[Role], cores: Sequence[int]) -> None:
    """Pin this process, if cores were given."""
    if cores:
        os.sched_setaffinity(0, cores_for(roles, cores))


def ranking(roles: Sequence[Role], nice: int) -> Callable[[bool], None]:
    """Has the kernel prefer this process (True), or treat it as it did before (False), if it only hosts a sequencer.

    Everybody waits for the one that reigns, and nobody for those that stand by: what they have to get ready would keep
    brokers from the processor. It takes a privilege; without, the process is as it is. Kernels that group processes by
    session rank those groups.
    """
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    if not nice or any(role.candidate is None for role in roles):
        return lambda _: None

    def rank(first: bool) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, nice if first else usual)
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(nice if first else usual))

    return rank
