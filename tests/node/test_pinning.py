"""Which process runs on which core, if configured."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from embarcadero.config.table import ClusterKeys, Config
from embarcadero.errors import BadValue
from embarcadero.node.process import cores_for, parse_cores, parse_roles
from embarcadero.node.supervisor import UpOptions


def test_the_sequencer_gets_the_first_core_and_brokers_the_following() -> None:
    """In turn, and a process with several roles gets the cores of all of them."""
    assert [cores_for(parse_roles(text), [4, 5, 6]) for text in ("sequencer", "broker:0", "broker:1", "broker:2")] == [
        {4}, {5}, {6}, {4},
    ]  # fmt: skip
    assert cores_for(parse_roles("sequencer,broker:0"), [4, 5, 6]) == {4, 5}
    assert [cores_for(parse_roles(f"replica:{number}"), [4, 5, 6]) for number in range(4)] == [{6}, {5}, {4}, {6}]


@pytest.mark.parametrize("text", ["9999", "x", "0,-1", "0;1", "²"])
def test_missing_cores_are_refused(text: str) -> None:
    """The error names them and lists the available cores, before anything is started."""
    with pytest.raises(BadValue, match=r"cannot use core.*choose from"):
        UpOptions(config=Config(cluster=ClusterKeys(pin=text))).check()


def test_pinning_is_optional() -> None:
    """An empty text pins nothing; usable cores are used as they are."""
    core = min(os.sched_getaffinity(0))

    assert parse_cores("") == []
    assert parse_cores(f" {core} ,") == [core]


def test_a_pinned_process_stays_on_its_core() -> None:
    """The kernel confirms it."""
    core = max(os.sched_getaffinity(0))
    script = (
        "import os; from embarcadero.node.process import pin; from embarcadero.node.process import SEQUENCER;"
        f"pin([SEQUENCER], [{core}]); print(os.sched_getaffinity(0))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == str({core})


@pytest.mark.parametrize(("roles", "nice"), [("sequencer", 7), ("sequencer,broker:0", 0), ("broker:0", 0)])
def test_sequencers_are_ranked_by_the_kernel(roles: str, nice: int) -> None:
    """A process that hosts only a sequencer gets the configured priority; others keep theirs."""
    script = (
        "import os; from embarcadero.node.process import ranking; from embarcadero.node.process import parse_roles;"
        f"ranking(parse_roles({roles!r}), 7)(True); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    done = subprocess.run(  # in a session of its own: the kernel may rank all of it permanently
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, start_new_session=True
    )

    assert int(done.stdout) == nice
