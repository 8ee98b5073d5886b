"""Faults of a case, injected into real processes, connections, disks and the store; each is undone before it ends.

They need no privileges. A full disk is a limit on the size of the files of one process (RLIMIT_FSIZE: writes fail with
EFBIG, which the product treats as a full disk). No more files is RLIMIT_NOFILE. A locked store is a write transaction
of this process. Failing syncs come from replicas that fail them on request (faults/disks.py): no real disk does.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from embarcadero.errors import ClusterError, EmbarcaderoError
from embarcadero.limits import BROKER_SILENT_S, STOPPED_S
from embarcadero.node.local import RestartableCluster, halt, runs, state_of, wait_until_gone
from embarcadero.node.standby import hand_over
from embarcadero.placement.directory import Directory
from embarcadero.placement.store import SqliteStore
from embarcadero_proof.chaos.cases import Trouble
from embarcadero_proof.chaos.disks import books, lost_spans
from embarcadero_proof.chaos.proxy import FAIR, Mood, Proxy
from embarcadero_proof.chaos.replacement import is_replaced
from embarcadero_proof.chaos.watch import Observer
from embarcadero_proof.faults.disks import failing_mark
from embarcadero_proof.sim.history import FabricLost, RoleFailed, Stopped

_ROLE_BACK_S: Final = 20.0
_REPLACED_S: Final = STOPPED_S + BROKER_SILENT_S
_AWAKE_S: Final = 0.5
_LOCK_S: Final = 5.0
_STRANGERS: Final = 60
_MOODS: Final = {
    "cut": Mood(refuse=True), "slow": Mood(delay_s=0.05), "drip": Mood(drip=True), "stall": Mood(deaf=True, mute=True),
    "half-dead": Mood(deaf=True, mute=True), "deaf": Mood(deaf=True), "mute": Mood(mute=True),
}  # fmt: skip
_RESET_AFTER: Final = frozenset({"half-dead", "deaf", "mute"})


class Stage:
    """The target of faults: a cluster, its proxy, and the observer that records each fault."""

    def __init__(
        self, cluster: RestartableCluster, proxy: Proxy | None, observer: Observer, rng: random.Random
    ) -> None:
        self.cluster, self.proxy, self.observer, self.rng = cluster, proxy, observer, rng
        self.over = threading.Event()  # faults end now
        self.upheaval = threading.Lock()  # held while the whole cluster is down
        self.kills = 0
        self.problems: list[str] = []  # why the cluster did not get the case's faults
        self.cut_short: set[int] = set()  # lanes of brokers that were open when the fabric was lost

    # --- targets ------------------------------------------------------------------------------------------------------
    def roles(self, target: str) -> dict[str, int]:
        """Return running roles that a target names, with their process ids. ClusterError if none runs."""
        pids = self.cluster.pids()
        found: dict[str, int] = {}
        for one in target.split("+"):
            found |= {role: pids[role] for role in self._names(one, sorted(pids)) if role in pids}
        if not found:
            raise ClusterError(f"no process of target {target} runs", "see the logs")
        return found

    def _names(self, target: str, known: list[str]) -> list[str]:
        of_kind = {kind: [role for role in known if role.split(":")[0] == kind] for kind in _KINDS}
        nodes = [role for role in known if role != "supervisor"]
        if target == "sequencer":
            return [self.cluster.leader()]
        if target in known:
            return [target]
        if target == "standby":
            leader = self.cluster.leader()
            return [role for role in of_kind["sequencer"] if role != leader][:1] or [leader]
        if target == "majority":
            replicas = of_kind["replica"]
            return self.rng.sample(replicas, min(len(replicas), 2))
        if target in _KINDS:
            return [self.rng.choice(of_kind[target])] if of_kind[target] else []
        groups = {"sequencers": of_kind["sequencer"], "brokers": of_kind["broker"], "replicas": of_kind["replica"]}
        if target == "any":
            return [self.rng.choice(nodes)] if nodes else []
        return groups.get(target, nodes if target == "nodes" else [])

    # --- when ---------------------------------------------------------------------------------------------------------
    def strike(self, trouble: Trouble, lasts_s: float) -> None:
        """Run one fault, from its beginning to its end."""
        if trouble.kind != "lose":
            with self.upheaval:
                pass  # not before the cluster is up again
        _DOERS[trouble.kind](self, trouble, lasts_s)

    def keep_striking(self, trouble: Trouble, until_s: float) -> None:
        """Repeat a fault until a moment of the monotonic clock. A fault that never struck is a problem of the case."""
        name, struck, why = f"{trouble.kind} {trouble.target}".strip(), False, "there was no time"
        self.over.wait(trouble.first_s)
        while not self.over.is_set() and (remaining_s := until_s - time.monotonic()) > 0:
            lasts_s = max(trouble.lasts_s[0], min(self.rng.uniform(*trouble.lasts_s), remaining_s))
            try:
                self.strike(trouble, lasts_s)
            except (ClusterError, ProcessLookupError, FileNotFoundError) as error:
                why = f"{type(error).__name__}: {error}"
                self.over.wait(0.05)  # the target is down just now
                continue
            except EmbarcaderoError as error:
                self.observer.saw(RoleFailed, process="cluster", error=f"{type(error).__name__}: {error}")
                return
            except Exception as error:
                self.problems.append(f"{name} failed: {type(error).__name__}: {error}")
                return
            struck = True
            self.over.wait(min(trouble.every_s * self.rng.uniform(0.6, 1.4), max(0.0, until_s - time.monotonic())))
        if not struck:
            self.problems.append(f"{name} never struck, so the case proves nothing: {why}")

    @contextmanager
    def noting(self, kind: str, target: str) -> Iterator[None]:
        """Record a fault when it is over. If the block raises, it was not injected or hit no process: no record."""
        began_us = self.observer.now_us()
        yield
        self.observer.broke(kind, target, began_us)


_KINDS: Final = ("sequencer", "broker", "replica")


# --- processes --------------------------------------------------------------------------------------------------------
def kill(stage: Stage, trouble: Trouble, lasts_s: float) -> None:  # noqa: ARG001 - all faults have this signature
    """Kill processes with SIGKILL; the supervisor starts them again."""
    roles = stage.roles(trouble.target)
    with stage.noting("kill", ", ".join(roles)):
        killed = sum(runs(pid) and _signalled(pid, signal.SIGKILL) for pid in roles.values())
        if not killed:
            raise ProcessLookupError(trouble.target)
        stage.kills += killed
        wait_until_gone(roles.values())


def _signalled(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def pause(stage: Stage, trouble: Trouble, lasts_s: float) -> None:
    """Stop processes with SIGSTOP, and continue them with SIGCONT."""
    roles = stage.roles(trouble.target)
    with stage.noting("pause", ", ".join(roles)):
        try:
            for pid in roles.values():
                halt(pid)
            stage.over.wait(lasts_s)
        finally:
            for pid in roles.values():
                _signalled(pid, signal.SIGCONT)


def zombie(stage: Stage, trouble: Trouble, lasts_s: float) -> None:
    """Stop a process with SIGSTOP until another one has replaced it, then continue it: it acts on stale state.

    The supervisor kills a broker when it is closed, so the supervisor is stopped, too, for a moment longer.
    """
    roles = stage.roles(trouble.target)
    guards = {"supervisor": stage.cluster.pids()["supervisor"]} if any(r.startswith("broker") for r in roles) else {}
    with stage.noting("zombie", ", ".join(roles)), closing(SqliteStore(stage.cluster.folder.store_path)) as store:
        directory = Directory(store)
        if early := [role for role, pid in roles.items() if is_replaced(directory, role, pid)]:
            raise ClusterError(f"{early[0]} has no role that another process could take over", "wait a moment")
        try:
            for pid in (guards | roles).values():
                halt(pid)
            _hold(stage, 0.0)  # a process stopped inside a transaction can't be replaced: then try again
            _await_replaced(stage, directory, roles)
            stage.over.wait(lasts_s)
            awake = [role for role, pid in roles.items() if state_of(pid) != "T"]
            stage.problems += [f"{role} was not stopped until it was replaced" for role in awake]
        finally:
            for pid in roles.values():
                _signalled(pid, signal.SIGCONT)
            for pid in guards.values():
                stage.over.wait(_AWAKE_S)
                _signalled(pid, signal.SIGCONT)


def _await_replaced(stage: Stage, directory: Directory, roles: dict[str, int]) -> None:
    give_up = time.monotonic() + _REPLACED_S
    while remaining := [role for role, pid in roles.items() if not is_replaced(directory, role, pid)]:
        if time.monotonic() > give_up:
            stage.problems.append(f"{remaining[0]} was stopped for {_REPLACED_S:.0f} s, but no process replaced it")
            return
        if stage.over.wait(0.05):
            return


def lose(stage: Stage, trouble: Trouble, lasts_s: float) -> None:  # noqa: ARG001
    """Kill the supervisor or everything, remove shared memory, and start again."""
    with stage.upheaval, stage.noting("kill", trouble.target):
        stage.kills += stage.cluster.kill_all(only_supervisor=trouble.target == "supervisor")
        known = books(stage.cluster.folder.store_path)
        lost_before = lost_spans(known, stage.cut_short)
        stage.cut_short |= {lane.lane for lane in known.lanes if lane.open}
        stage.over.wait(0.1)  # acks in flight arrive
        stage.observer.saw(Stopped, clean=False, lost=lost_before)
        stage.observer.saw(FabricLost)
        stage.cluster.start()


def roll(stage: Stage, trouble: Trouble, lasts_s: float) -> None:  # noqa: ARG001
    """SIGTERM one role after the other, each when the one before has restarted."""
    for role, pid in stage.roles("nodes").items():
        if stage.over.is_set():
            return
        with stage.noting("restart", role):
            os.kill(pid, signal.SIGTERM)
            _until(stage, lambda role=role, pid=pid: stage.cluster.pids().get(role, pid) != pid)  # type: ignore[misc]
        stage.over.wait(0.3)


def _until(stage: Stage, done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + _ROLE_BACK_S
    while not done() and time.monotonic() < give_up:
        time.sleep(0.02)
    if not done():
        stage.observer.saw(RoleFailed, process="cluster", error=f"a role was not back within {_ROLE_BACK_S:.0f} s")


def move(stage: Stage, trouble: Trouble, lasts_s: float) -> None:  # noqa: ARG001
    """Have a standby take over from a working leader."""
    with stage.noting("hand-over", stage.cluster.leader()):
        hand_over(stage.cluster.folder)


# --- connections ------------------------------------------------------------------------------------------------------
def mistreat(stage: Stage, trouble: Trouble, lasts_s: float) -> None:
    """Impair connections to one broker, or all, for a while; some moods end with a reset."""
    proxy, every = stage.proxy, range(stage.cluster.brokers)
    brokers = list(every) if trouble.target == "brokers" else [stage.rng.choice(every)]
    if proxy is None or not any(proxy.carries(broker) for broker in brokers):
        raise ClusterError(f"no client is connected to {trouble.target}", "make clients use the proxy")
    names = trouble.target if trouble.target == "brokers" else f"broker:{brokers[0]}"
    with stage.noting(trouble.kind, names):
        for broker in brokers:
            proxy.treat(broker, trouble, _MOODS[trouble.kind])
        try:
            stage.over.wait(lasts_s)
        finally:
            for broker in brokers:
                if trouble.kind in _RESET_AFTER:
                    proxy.cut(broker)
                proxy.treat(broker, trouble, FAIR)


def strangers(stage: Stage, trouble: Trouble, lasts_s: float) -> None:
    """Open connections that send nothing, noise, or the beginning of a request."""
    rng, first, connected = stage.rng, stage.cluster.port, False
    with stage.noting("strangers", trouble.target), contextlib.ExitStack() as open_ones:
        for _ in range(_STRANGERS):
            with contextlib.suppress(OSError):
                sock = socket.create_connection(("127.0.0.1", first + rng.randrange(stage.cluster.brokers)), timeout=1)
                open_ones.enter_context(closing(sock))
                sock.sendall(rng.choice([b"", b"GET / HTTP/1.0\r\n\r\n", rng.randbytes(300), rng.randbytes(20_000)]))
                connected = True
        if not connected:
            raise ClusterError("no broker accepts connections", "see the logs")
        stage.over.wait(lasts_s)


# --- disks ------------------------------------------------------------------------------------------------------------
def full(stage: Stage, trouble: Trouble, lasts_s: float) -> None:
    """Prevent the files of these replicas from growing."""
    _limit(stage, trouble, lasts_s, "full disk", resource.RLIMIT_FSIZE)


def no_files(stage: Stage, trouble: Trouble, lasts_s: float) -> None:
    """Prevent these replicas from opening files."""
    _limit(stage, trouble, lasts_s, "no files", resource.RLIMIT_NOFILE)


def _limit(stage: Stage, trouble: Trouble, lasts_s: float, what: str, which: int) -> None:
    roles = stage.roles(trouble.target)
    with stage.noting(what, ", ".join(roles)):
        before = {pid: resource.prlimit(pid, which) for pid in roles.values()}
        try:
            for pid, (_, hard) in before.items():
                resource.prlimit(pid, which, (0, hard))
            stage.over.wait(lasts_s)
        finally:
            for pid, limits in before.items():
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, which, limits)


def fail_syncs(stage: Stage, trouble: Trouble, lasts_s: float) -> None:
    """Fail every sync of these replicas."""
    roles = stage.roles(trouble.target)
    marks = [failing_mark(_folder(stage, role)) for role in roles]
    with stage.noting("failing disk", ", ".join(roles)):
        try:
            for mark in marks:
                mark.touch()
            stage.over.wait(lasts_s)
        finally:
            for mark in marks:
                mark.unlink(missing_ok=True)


def wipe(stage: Stage, trouble: Trouble, lasts_s: float) -> None:  # noqa: ARG001
    """Remove a replica's folder and kill the replica: it restarts with an empty disk."""
    for role, pid in stage.roles(trouble.target).items():
        folder = _folder(stage, role)
        away = folder.with_name(f"away-{folder.name}-{stage.observer.now_us()}")
        with stage.noting("lost disk", role):
            folder.rename(away)
            os.kill(pid, signal.SIGKILL)
            stage.kills += 1
            shutil.rmtree(away, ignore_errors=True)
            _until(stage, lambda pid=pid: not runs(pid))  # type: ignore[misc]


def delete(stage: Stage, trouble: Trouble, lasts_s: float) -> None:  # noqa: ARG001
    """Delete one of a replica's segment files."""
    role, path = _segment(stage, trouble)
    with stage.noting("lost file", role):
        path.unlink()


def rot(stage: Stage, trouble: Trouble, lasts_s: float) -> None:  # noqa: ARG001
    """Flip a bit in one of a replica's segment files, in place."""
    role, path = _segment(stage, trouble)
    with stage.noting("flipped bit", role), path.open("r+b") as file:
        offset = stage.rng.randrange(max(1, path.stat().st_size))
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([(byte[0] if byte else 0) ^ 1 << stage.rng.randrange(8)]))


def _folder(stage: Stage, role: str) -> Path:
    return stage.cluster.folder.replica(int(role.split(":")[1]))


def _segment(stage: Stage, trouble: Trouble) -> tuple[str, Path]:
    role = next(iter(stage.roles(trouble.target)))
    files = sorted(_folder(stage, role).rglob("*.log"))
    if not files:
        raise FileNotFoundError(trouble.target)
    return role, stage.rng.choice(files)


# --- the store --------------------------------------------------------------------------------------------------------
def lock_store(stage: Stage, trouble: Trouble, lasts_s: float) -> None:
    """Hold the write lock of the store's file."""
    del trouble
    with stage.noting("store locked", "store"):
        _hold(stage, lasts_s)


def slow_store(stage: Stage, trouble: Trouble, lasts_s: float) -> None:
    """Hold the write lock for 50 of every 100 ms."""
    del trouble
    until_s = time.monotonic() + lasts_s
    with stage.noting("store slow", "store"):
        _hold(stage, 0.05)
        while time.monotonic() < until_s and not stage.over.is_set():
            stage.over.wait(0.05)
            _hold(stage, 0.05)


def _hold(stage: Stage, lasts_s: float) -> None:
    with closing(sqlite3.connect(stage.cluster.folder.store_path, timeout=_LOCK_S, isolation_level=None)) as store:
        try:
            store.execute("BEGIN IMMEDIATE")
            stage.over.wait(lasts_s)
            store.execute("ROLLBACK")
        except sqlite3.OperationalError as error:
            raise FileNotFoundError("the store is busy") from error


_DOERS: Final[dict[str, Callable[[Stage, Trouble, float], None]]] = {
    "kill": kill, "pause": pause, "zombie": zombie, "lose": lose, "roll": roll, "hand-over": move,
    "strangers": strangers, "full": full, "failing": fail_syncs, "no-files": no_files, "wipe": wipe, "delete": delete,
    "rot": rot, "store-locked": lock_store, "store-slow": slow_store, **dict.fromkeys(_MOODS, mistreat),
}  # fmt: skip
KINDS: Final = frozenset(_DOERS)
"""All kinds of faults for cases."""
