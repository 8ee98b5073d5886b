"""Privacy from other users of the machine: they see nothing of a cluster, and no secret in any list of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import embarcadero as emb
from embarcadero.config import Config, load
from embarcadero.limits import MIB
from embarcadero.node.local import LocalCluster

pytestmark = pytest.mark.system

SECRET = "hush-hush-0123456789"


@pytest.fixture
def configured(tmp_path: Path) -> Config:
    """A configuration with a secret, and a folder that an earlier version left open to all."""
    folder = tmp_path / "cluster"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    for name in ("logs", "replica-0"):
        (folder / name).mkdir()
        (folder / name).chmod(0o755)
    (folder / "logs" / "supervisor.log").touch()
    (folder / "logs" / "supervisor.log").chmod(0o644)
    return load(None, {"tier.properties": [f"s3.secret-access-key={SECRET}"], "tier.enabled": True})


@pytest.fixture
def cluster(tmp_path: Path, configured: Config) -> Iterator[LocalCluster]:
    before = os.umask(0o022)
    try:
        with LocalCluster(
            brokers=1, replicas=1, data_dir=tmp_path / "cluster", log_bytes=32 * MIB, config=configured
        ) as made:
            yield made
    finally:
        os.umask(before)


def descendants(pid: int) -> list[int]:
    """A process and all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in descendants(int(child)))]


def test_secrets_reach_the_processes_and_are_visible_nowhere(cluster: LocalCluster) -> None:
    """Not in `ps`, not in cluster.json, not in logs; only in a file of their own."""
    with emb.connect(cluster.addresses) as log:
        log.create_topic("orders", replicas=1)
    processes = descendants(cluster.pids()["supervisor"])
    assert len(processes) >= 5
    for pid in processes:
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    holders = [path.name for path in cluster.data_dir.rglob("*") if path.is_file() and SECRET in _text(path)]
    assert holders == ["secrets.json"]
    assert cluster.folder.require_running().config.tier.properties == [f"s3.secret-access-key={SECRET}"]


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")


def test_data_and_memory_are_private(cluster: LocalCluster) -> None:
    """Whatever the umask is, and also in a folder that was open to all before."""
    with emb.connect(cluster.addresses) as log:
        log.create_topic("orders", replicas=1)
        with log.publisher("orders", ack=2) as publisher:
            publisher.send(b"1")
    fabric = Path(cluster.report().fabric)
    found = [cluster.data_dir, fabric, *cluster.data_dir.rglob("*"), *fabric.rglob("*")]
    assert len(found) > 20
    assert [path for path in found if not path.is_symlink() and path.stat().st_mode & 0o077] == []
