"""Real processes: all are killed, the fabric is lost, its mirror is not. Publishers get exact losses."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import embarcadero as emb
from embarcadero.errors import RecordsLost
from embarcadero.node.local import RestartableCluster

pytestmark = pytest.mark.system
WAIT_S = 60


def until(what: Callable[[], Any]) -> Any:
    give_up = time.monotonic() + WAIT_S
    while not (found := what()):
        assert time.monotonic() < give_up, "it did not happen"
        time.sleep(0.02)
    return found


def cluster_in(folder: Path) -> RestartableCluster:
    return RestartableCluster(
        folder / "data", brokers=1, replicas=1, fabric__mirror=folder / "module", fabric__log_bytes=1 << 20
    )


def told(publisher: emb.Publisher) -> RecordsLost:
    """The losses reported to the publisher's caller, once the publisher knows them."""

    def heard() -> RecordsLost | None:
        try:
            publisher.flush(timeout=WAIT_S)
        except RecordsLost as lost:
            return lost
        return None

    found = until(heard)
    assert isinstance(found, RecordsLost)
    return found


def test_losing_the_fabric_loses_no_ordered_entry(tmp_path: Path) -> None:
    """Orders 5 and 0, acks 1 and 2, a stopped replica: records ordered since then are lost, to the record."""
    with ExitStack() as stack:
        cluster = cluster_in(tmp_path)
        stack.callback(cluster.end)
        cluster.start()
        log = stack.enter_context(emb.connect(cluster.addresses))
        log.create_topic("strong", order=5, replicas=1, durable_on=1)
        log.create_topic("loose", order=0, replicas=1, durable_on=1)
        strong, loose, safe = (log.publisher(name, ack=ack, linger_ms=0) for name, ack in (
            ("strong", 1), ("loose", 1), ("strong", 2)))  # fmt: skip
        for number in range(20):
            strong.send(b"early %d" % number).result(WAIT_S)
            loose.send(b"early %d" % number).result(WAIT_S)
        safe.send(b"safe").result(WAIT_S)
        until(lambda: [end for end in log.tail("loose").lanes if end.durable_index == end.index == 20])
        os.kill(cluster.pids()["replica:0"], signal.SIGSTOP)
        late = [strong.send(b"late %d" % number).result(WAIT_S) for number in range(10)]
        late_loose = [loose.send(b"late %d" % number).result(WAIT_S) for number in range(7)]
        pending = safe.send(b"pending")
        ordered = until(lambda: (end := log.tail("strong")).index == late[-1].index + 2 and end)
        assert not pending.done()
        before = cluster.report()
        assert Path(before.mirror.folder).is_dir()
        cluster.kill_all()
        assert not Path(before.fabric).exists()

        cluster.start()
        again = pending.result(WAIT_S)  # never acked at the position that was lost; sent again, it has a new position
        assert ordered.index <= again.index < ordered.index + 10  # and not above a ceiling that is thousands away
        assert ordered.seq <= again.seq
        assert told(strong).positions == tuple(late)
        assert told(loose).positions == tuple(late_loose)
        saved = {one.topic: one for one in cluster.report().mirror.saved}
        assert (saved["strong"].ordered, saved["strong"].records) == (ordered.index, 11)
        assert (saved["loose"].durable, saved["loose"].ordered, saved["loose"].records) == (20, 27, 7)
        for publisher in (strong, safe):
            assert publisher.send(b"after").result(WAIT_S) > again
        values = log.read("strong", read="durable", timeout=WAIT_S).column("value").to_pylist()
        assert values == [*(b"early %d" % number for number in range(20)), b"safe", b"pending", b"after", b"after"]
        home = Path(before.mirror.folder).parent
        until(lambda: len(list(home.glob("generation-*"))) == 1)  # the old mirror is removed once all lanes are back
        log.close()
    assert not home.exists()
