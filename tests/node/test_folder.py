"""A cluster's folder: where it is, which supervisor holds it, and where its fabric is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from embarcadero.config import Config
from embarcadero.errors import AlreadyRunning, BadValue, ClusterError, Corrupt, NotRunning
from embarcadero.limits import GIB
from embarcadero.node import fabric_folder as module
from embarcadero.node.fabric_folder import choose_fabric
from embarcadero.node.folder import ClusterFolder, ClusterInfo, NodeInfo, default_data_dir


@pytest.fixture
def folder(tmp_path: Path) -> ClusterFolder:
    made = ClusterFolder(tmp_path / "cluster")
    made.create()
    return made


def info(**changes: object) -> ClusterInfo:
    fields: dict[str, object] = {
        "version": "0.1.0", "id": "0000000a", "generation": 1, "fabric": "/nowhere", "config": Config(),
        "supervisor": 77,
        "nodes": [NodeInfo(roles="sequencer", pid=1), NodeInfo(roles="broker:0,broker:1", pid=2)],
    }  # fmt: skip
    return ClusterInfo(**(fields | changes))  # type: ignore[arg-type]


def test_the_environment_names_the_data_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    """EMBARCADERO_DATA_DIR wins, then XDG_STATE_HOME, then the home folder."""
    monkeypatch.setenv("EMBARCADERO_DATA_DIR", "/a/b")
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    monkeypatch.setenv("HOME", "/home/me")
    assert default_data_dir() == Path("/a/b")
    monkeypatch.delenv("EMBARCADERO_DATA_DIR")
    assert default_data_dir() == Path("/state/embarcadero/default")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_data_dir() == Path("/home/me/.local/state/embarcadero/default")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_informed_of_the_missing_permission(folder: ClusterFolder) -> None:
    """The error does not claim that no cluster runs: an unreadable folder is no evidence."""
    folder.write_info(info())
    reading, writing = os.pipe()
    with folder.locked():
        if not (child := os.fork()):
            try:
                os.setuid(65_534)
                for ask in (folder.running_pid, folder.read_info):
                    try:
                        ask()
                        os.write(writing, b"nothing was missing\n")
                    except ClusterError as error:
                        os.write(writing, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as told:
        lines = told.read().splitlines()

    assert len(lines) == 2
    for line in lines:
        assert re.match(r"ClusterError: user \w+ is not allowed to read .* \(run this as user root; .*\)", line)


def test_hugetlbfs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no space for small files, and does not support pipes: the error names an alternative."""
    mounts = tmp_path / "mounts"
    mounts.write_text(f"none / ext4 rw 0 0\nnone {tmp_path} hugetlbfs rw 0 0\nnone {tmp_path}/fast tmpfs rw 0 0\nx\n")
    assert module.file_system(tmp_path / "pages", mounts) == "hugetlbfs"
    assert module.file_system(tmp_path / "fast" / "pages", mounts) == "tmpfs"
    assert module.file_system(tmp_path, tmp_path / "nothing") == ""
    monkeypatch.setattr(module, "file_system", lambda _: "hugetlbfs")
    with pytest.raises(BadValue, match="hugetlbfs") as refused:
        choose_fabric(tmp_path, "0a", tmp_path / "pages", 1 * GIB)
    assert "huge=advise" in refused.value.hint


def test_a_folder_has_one_supervisor(folder: ClusterFolder) -> None:
    """While one holds the lock, a second is refused with the first one's process id; afterwards it is free again."""
    with folder.locked():
        assert folder.running_pid() == os.getpid()
        with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"), ClusterFolder(folder.path).locked():
            pass
    assert folder.running_pid() is None
    with folder.locked():
        assert folder.running_pid() == os.getpid()


HOLDER = """
import sys, time
from pathlib import Path
from embarcadero.node.folder import ClusterFolder
with ClusterFolder(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_killed_supervisor_leaves_no_lock(folder: ClusterFolder) -> None:
    """The lock is the kernel's: after kill -9 no cluster runs here, whatever the lock file contains."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder.path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    assert folder.running_pid() == holder.pid
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert (folder.path / "lock").read_text() == str(holder.pid)
    assert folder.running_pid() is None


def test_a_folder_without_a_cluster_is_not_running(tmp_path: Path) -> None:
    """A folder that does not exist is an error with the remedy."""
    nowhere = ClusterFolder(tmp_path / "nowhere")
    assert nowhere.running_pid() is None
    for ask in (nowhere.require_running, nowhere.read_info):
        with pytest.raises(NotRunning, match="embarcadero up"):
            ask()


def test_a_stopped_cluster_is_not_running(folder: ClusterFolder) -> None:
    """A cluster.json left by an earlier run is no evidence of a cluster."""
    folder.write_info(info())
    assert folder.read_info() == info()
    with pytest.raises(NotRunning):
        folder.require_running()
    with folder.locked():
        assert folder.require_running() == info()


def test_a_damaged_cluster_file_is_a_typed_error(folder: ClusterFolder) -> None:
    """An invalid cluster.json is reported by name."""
    (folder.path / "cluster.json").write_text('{"version": 7}')
    with pytest.raises(Corrupt, match=r"cluster\.json"):
        folder.read_info()


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    """A file at the path of the folder is named."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="--data-dir"):
        ClusterFolder(tmp_path / "file" / "cluster").create()


def test_roles_are_found_by_name() -> None:
    """The process of a role is that of its node; a role without a node has none."""
    assert [info().pid_of(role) for role in ("sequencer", "broker:1", "broker:11")] == [1, 2, 0]


def test_the_fabric_is_in_the_requested_folder(tmp_path: Path) -> None:
    """A requested folder gets a sub-folder with the cluster's id, so that nothing else there is ever removed."""
    assert choose_fabric(tmp_path, "0a", tmp_path / "mine", 1 * GIB) == (tmp_path / "mine" / "embarcadero-0a", "")


def test_the_fabric_is_in_shared_memory_with_enough_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory is the default if it has space; otherwise the data folder, and the user gets the reason."""
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(module, "SHARED_MEMORY", shared)
    assert choose_fabric(tmp_path, "0a", None, 1) == (shared / "embarcadero-0a", "")
    on_disk = choose_fabric(tmp_path, "0a", None, 1 << 60)
    assert on_disk.folder == tmp_path / "fabric" / "embarcadero-0a"
    assert "MiB free" in on_disk.note
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "missing")
    assert "is not writable" in choose_fabric(tmp_path, "0a", None, 1).note
