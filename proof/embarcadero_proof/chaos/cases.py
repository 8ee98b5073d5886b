"""The matrix as data: named cases, each with a few faults for a running cluster, described in a sentence.

A fault strikes again and again until the case's time is over. It begins, lasts for a time drawn from `lasts_s`, is
undone, and after about `every_s` the next one begins. It lasts at least the lower bound of `lasts_s`, even if the case
then takes longer. Faults of one case run at the same time. A zombie is stopped until another process has replaced it,
and for `lasts_s` after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from embarcadero.errors import BadValue
from embarcadero.limits import REPLICA_SILENT_S, TAKEOVER_AFTER_S

REPLICA_GIVEN_UP_S: Final = (REPLICA_SILENT_S + 0.5, REPLICA_SILENT_S + 1.5)
BRIEF_S: Final = (0.1, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One kind of fault. `target` names processes, brokers or replicas as troubles.py resolves them."""

    kind: str
    target: str = ""
    every_s: float = 2.0
    lasts_s: tuple[float, float] = (0.0, 0.0)
    first_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """A named case. Its clients use the proxy if one of its faults concerns connections."""

    name: str
    words: str
    troubles: tuple[Trouble, ...] = ()
    least_s: float = 0.0  # a shorter run is useless

    @property
    def by_proxy(self) -> bool:
        """Whether clients reach brokers through the proxy."""
        return any(trouble.kind in NETWORK_KINDS for trouble in self.troubles)

    @property
    def loses_fabric(self) -> bool:
        """Whether everything is killed, so that records in memory only may be lost."""
        return any(trouble.kind in LOSING_KINDS for trouble in self.troubles)


NETWORK_KINDS: Final = frozenset({"cut", "slow", "drip", "stall", "half-dead", "deaf", "mute"})
LOSING_KINDS: Final = frozenset({"lose"})


def _kill(target: str, every_s: float = 2.0, first_s: float = 0.2) -> Trouble:
    return Trouble(kind="kill", target=target, every_s=every_s, first_s=first_s)


def _pause(target: str, lasts_s: tuple[float, float], every_s: float = 1.0, first_s: float = 0.2) -> Trouble:
    return Trouble(kind="pause", target=target, lasts_s=lasts_s, every_s=every_s, first_s=first_s)


def _zombie(target: str) -> Trouble:
    return Trouble(kind="zombie", target=target, lasts_s=(0.0, 1.0), every_s=1.0)


def _net(kind: str, target: str, lasts_s: tuple[float, float], every_s: float = 0.7) -> Trouble:
    return Trouble(kind=kind, target=target, lasts_s=lasts_s, every_s=every_s)


def _disk(kind: str, target: str, lasts_s: tuple[float, float] = (0.0, 0.0), every_s: float = 2.0) -> Trouble:
    return Trouble(kind=kind, target=target, lasts_s=lasts_s, every_s=every_s)


# fmt: off
CASES: Final = (
    Case("calm", "no faults: acks and reads of a healthy cluster are checked"),
    # --- kill -9 ---
    Case("kill-sequencer", "the leader is killed, again and again", (_kill("sequencer", 3.0),)),
    Case("kill-standby", "a standby sequencer is killed; without one, the only sequencer", (_kill("standby"),)),
    Case("kill-sequencers", "all sequencers are killed together", (_kill("sequencers", 3.5),)),
    Case("kill-broker", "one broker after the other is killed", (_kill("broker", 1.0),)),
    Case("kill-brokers", "all brokers are killed together", (_kill("brokers", 3.0),)),
    Case("kill-replica", "one replica after the other is killed", (_kill("replica", 1.0),)),
    Case("kill-majority", "two of the three replicas are killed together: ack 2 waits", (_kill("majority", 3.0),)),
    Case("kill-replicas", "all replicas are killed together", (_kill("replicas", 3.5),)),
    Case("kill-nodes", "all node processes are killed together; the supervisor and the memory live",
         (_kill("nodes", 4.0),)),
    Case("kill-any", "any process of the cluster except the supervisor is killed, every half second",
         (_kill("any", 0.5),)),
    Case("kill-supervisor", "the supervisor is killed, and all nodes with it; all start again with empty memory",
         (Trouble(kind="lose", target="supervisor", every_s=3.0, first_s=1.0),), least_s=8.0),
    Case("kill-everything", "every process is killed and shared memory is removed; the cluster starts again",
         (Trouble(kind="lose", target="everything", every_s=3.0, first_s=1.0),), least_s=8.0),
    # --- SIGSTOP, SIGCONT ---
    Case("pause-sequencer", "the leader is paused for 0.1 to 0.5 s", (_pause("sequencer", BRIEF_S),)),
    Case("zombie-sequencer", "the leader is paused until another sequencer leads, then continues",
         (_zombie("sequencer"),)),
    Case("pause-standby", "a standby is paused, at most for somewhat longer than takeover_after_ms",
         (_pause("standby", (0.5, TAKEOVER_AFTER_S + 0.5)),)),
    Case("pause-broker", "one broker is paused for 0.1 to 0.5 s", (_pause("broker", BRIEF_S, 0.5),)),
    Case("zombie-broker", "one broker is paused until it is closed, and continues before it is killed",
         (_zombie("broker"),)),
    Case("pause-brokers", "all brokers are paused for up to a second", (_pause("brokers", (0.2, 1.0)),)),
    Case("pause-replica", "one replica is paused for 0.1 to 0.5 s", (_pause("replica", BRIEF_S, 0.5),)),
    Case("zombie-replica", "one replica is paused until all its ranges are sealed without it, then continues",
         (_zombie("replica"),)),
    Case("pause-majority", "two of the three replicas are paused until they count as silent: ack 2 waits",
         (_pause("majority", REPLICA_GIVEN_UP_S),)),
    Case("pause-nodes", "all node processes are paused for 1 to 3 s", (_pause("nodes", (1.0, 3.0)),)),
    Case("pause-supervisor", "the supervisor is paused while a broker and a replica die: they are not started again",
         (_pause("supervisor", (2.0, 3.0)), _kill("broker", 2.5, 0.5), _kill("replica", 2.5, 1.0))),
    # --- connections ---
    Case("cut-connections", "all connections to one broker are reset", (_net("cut", "broker", (0.0, 0.3), 0.3),)),
    Case("cut-all", "all connections to all brokers are reset, and none is accepted for up to a second",
         (_net("cut", "brokers", (0.1, 1.0)),)),
    Case("slow-connections", "all data to and from all brokers is delayed by 50 ms",
         (_net("slow", "brokers", (1.0, 3.0)),)),
    Case("dripping", "data arrives in pieces of a few bytes", (_net("drip", "brokers", (0.5, 1.0), 0.5),)),
    Case("stalled", "connections to one broker carry nothing for a while, then all of it",
         (_net("stall", "broker", (0.5, 4.0)),)),
    Case("half-dead", "connections to one broker carry nothing and stay open; then they are reset",
         (_net("half-dead", "broker", (0.5, 4.0)),)),
    Case("deaf-broker", "one-way: requests to a broker do not arrive; then connections are reset",
         (_net("deaf", "broker", (0.5, 4.0)),)),
    Case("mute-broker", "one-way: answers of a broker do not arrive (acks are lost); then connections are reset",
         (_net("mute", "broker", (0.5, 4.0)),)),
    Case("strangers", "many connections send noise, half a hello, or nothing",
         (Trouble(kind="strangers", target="brokers", lasts_s=(0.5, 1.5), every_s=0.3),)),
    # --- disks ---
    Case("full-disk", "one replica's disk is full", (_disk("full", "replica", (0.5, 2.5)),)),
    Case("full-disks", "all replicas' disks are full: ack 2 waits", (_disk("full", "replicas", (0.5, 2.0)),)),
    Case("failing-disk", "no sync of one replica succeeds", (_disk("failing", "replica", (0.2, 2.5)),)),
    Case("failing-disks", "no sync of any replica succeeds: ack 2 waits", (_disk("failing", "replicas", (0.2, 1.5)),)),
    Case("no-files", "one replica can't open files", (_disk("no-files", "replica", (0.5, 2.5)),)),
    Case("lost-disk", "a replica is killed and comes back with an empty disk, always the same one",
         (_disk("wipe", "replica:0", every_s=3.0),)),
    Case("lost-files", "segment files of a running replica are deleted",
         (_disk("delete", "replica:0", every_s=1.5),)),
    Case("rotten-disk", "bits of one replica's segment files flip", (_disk("rot", "replica:0", every_s=0.3),)),
    # --- the store ---
    Case("store-locked", "a transaction holds the store's write lock for up to 4 s",
         (Trouble(kind="store-locked", lasts_s=(1.0, 4.0), every_s=1.0),)),
    Case("store-slow", "the store's write lock is taken half of the time",
         (Trouble(kind="store-slow", lasts_s=(2.0, 3.0), every_s=0.5),)),
    Case("store-locked-kills", "sequencer and brokers die while the store is locked",
         (Trouble(kind="store-locked", lasts_s=(1.0, 2.5), every_s=1.5),
          _kill("sequencer", 3.0, 0.6), _kill("broker", 2.0, 1.0))),
    # --- planned ---
    Case("rolling-restart", "all roles are restarted one by one, as for a new version",
         (Trouble(kind="roll", every_s=0.5),)),
    Case("hand-over", "the sequencer hands over to a standby, again and again",
         (Trouble(kind="hand-over", every_s=0.7),)),
    # --- several at once ---
    Case("hand-over-and-kills", "the sequencer hands over while any process may die",
         (Trouble(kind="hand-over", every_s=1.0), _kill("any", 1.5, 0.7))),
    Case("broker-and-sequencer", "a broker and the leader die together", (_kill("broker+sequencer", 3.0),)),
    Case("zombies", "the sequencer, a broker and a replica are paused together until all are replaced, then continue",
         (_zombie("sequencer+broker+replica"),)),
    Case("kill-in-bad-weather", "processes die while connections are slow and reset",
         (_kill("any", 1.0), _net("slow", "brokers", (0.5, 1.5), 0.5), _net("cut", "broker", (0.0, 0.2), 0.8))),
    Case("disk-and-kills", "a replica's disk is full while others die",
         (_disk("full", "replica:0", (1.0, 3.0)), _kill("replica", 2.0))),
    Case("failing-and-kills", "a replica's syncs fail while others die",
         (_disk("failing", "replica:0", (0.5, 2.0)), _kill("replica", 2.0))),
    Case("storm", "kills, pauses, a slow store, a full disk, cut and stalled connections, all together",
         (_kill("any", 1.0), _pause("any", (0.1, 1.5), 1.0), _disk("full", "replica:0", (0.5, 1.0)),
          Trouble(kind="store-slow", lasts_s=(0.5, 1.0), every_s=1.0), _net("cut", "broker", (0.0, 0.2), 1.0),
          _net("stall", "broker", (0.2, 1.0), 1.0))),
)
# fmt: on


def find(names: list[str]) -> list[Case]:
    """Return the cases of these names, all without names. BadValue if there is no such case."""
    known = {case.name: case for case in CASES}
    if wrong := [name for name in names if name not in known]:
        raise BadValue(f"there is no case {wrong[0]!r}", "see `embarcadero-proof chaos matrix --list`")
    return [known[name] for name in names] or list(CASES)
