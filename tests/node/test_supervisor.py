"""What the supervisor makes of nodes that can't be started."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from embarcadero.config import load
from embarcadero.errors import ClusterError
from embarcadero.node.children import Child
from embarcadero.node.supervisor import Supervisor, UpOptions


@pytest.mark.parametrize("ready", [False, True])
def test_only_a_first_start_that_fails_stops_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    """`up` says what keeps a node from starting; a cluster that runs tries again, and keeps its fabric."""
    tries = 0

    async def main() -> Supervisor:
        supervisor = Supervisor(UpOptions(config=load(None, {"cluster.data_dir": tmp_path})))
        supervisor._ready = ready

        async def cannot(_: Child) -> None:
            nonlocal tries
            tries += 1
            if tries == 2:
                supervisor._stop.set()
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(Child, "_start", cannot)
        await supervisor._keep(supervisor._children[0])
        return supervisor

    supervisor = asyncio.run(asyncio.wait_for(main(), 60))
    if ready:
        assert (tries, supervisor._failure) == (2, None)
    else:
        assert tries == 1
        assert isinstance(supervisor._failure, ClusterError)
        assert supervisor._failure.message == "can't start sequencer: Resource temporarily unavailable"
