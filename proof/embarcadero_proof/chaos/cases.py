"""The matrix as data: named cases, each a few troubles that a running cluster gets into, in words.

A trouble strikes again and again until the case's time is over: it begins, lasts for a time drawn from `lasts_s` (never
less, though the case takes longer by that), is undone, and after about `every_s` the next one begins. Troubles of one
case run at the same time. A zombie stands still until another process has replaced it, and for `lasts_s` after that.
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
    """One kind of trouble. `target` names processes, brokers or replicas as troubles.py finds them."""

    kind: str
    target: str = ""
    every_s: float = 2.0
    lasts_s: tuple[float, float] = (0.0, 0.0)
    first_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Case:
    """A named case. Its clients go through the proxy if one of its troubles is with connections."""

    name: str
    words: str
    troubles: tuple[Trouble, ...] = ()
    least_s: float = 0.0  # it makes no sense if it is shorter

    @property
    def by_proxy(self) -> bool:
        """Whether clients reach brokers through the proxy."""
        return any(trouble.kind in NETWORK_KINDS for trouble in self.troubles)

    @property
    def loses_fabric(self) -> bool:
        """Whether everything is killed, so that what only memory had may be lost."""
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
    Case("calm", "nothing breaks: acks and reads of a healthy cluster are checked"),
    # --- kill -9 ---
    Case("kill-sequencer", "the leader is killed, again and again", (_kill("sequencer", 3.0),)),
    Case("kill-standby", "a standby sequencer is killed; without one, the only sequencer", (_kill("standby"),)),
    Case("kill-sequencers", "all sequencers are killed at once", (_kill("sequencers", 3.5),)),
    Case("kill-broker", "one broker after the other is killed", (_kill("broker", 1.0),)),
    Case("kill-brokers", "all brokers are killed at once", (_kill("brokers", 3.0),)),
    Case("kill-replica", "one replica after the other is killed", (_kill("replica", 1.0),)),
    Case("kill-majority", "two of the three replicas are killed at once: ack 2 waits", (_kill("majority", 3.0),)),
    Case("kill-replicas", "all replicas are killed at once", (_kill("replicas", 3.5),)),
    Case("kill-nodes", "every node process is killed at once; the supervisor and the memory live",
         (_kill("nodes", 4.0),)),
    Case("kill-any", "any process of the cluster but the supervisor, every half second", (_kill("any", 0.5),)),
    Case("kill-supervisor", "the supervisor is killed, and all die with it; started again in an empty memory",
         (Trouble(kind="lose", target="supervisor", every_s=3.0, first_s=1.0),), least_s=8.0),
    Case("kill-everything", "every process is killed and shared memory removed; started again",
         (Trouble(kind="lose", target="everything", every_s=3.0, first_s=1.0),), least_s=8.0),
    # --- SIGSTOP, SIGCONT ---
    Case("pause-sequencer", "the leader stands still for 0.1 to 0.5 s", (_pause("sequencer", BRIEF_S),)),
    Case("zombie-sequencer", "the leader stands still until another one leads, and wakes up",
         (_zombie("sequencer"),)),
    Case("pause-standby", "a standby stands still, for up to longer than it waits for a sign of the sequencer's life",
         (_pause("standby", (0.5, TAKEOVER_AFTER_S + 0.5)),)),
    Case("pause-broker", "one broker stands still for 0.1 to 0.5 s", (_pause("broker", BRIEF_S, 0.5),)),
    Case("zombie-broker", "one broker stands still until it is closed, and wakes up before it is killed",
         (_zombie("broker"),)),
    Case("pause-brokers", "all brokers stand still for up to a second", (_pause("brokers", (0.2, 1.0)),)),
    Case("pause-replica", "one replica stands still for 0.1 to 0.5 s", (_pause("replica", BRIEF_S, 0.5),)),
    Case("zombie-replica", "one replica stands still until all its ranges are sealed without it, and wakes up",
         (_zombie("replica"),)),
    Case("pause-majority", "two of the three replicas stand still until they are given up: ack 2 waits",
         (_pause("majority", REPLICA_GIVEN_UP_S),)),
    Case("pause-nodes", "every node process stands still for 1 to 3 s", (_pause("nodes", (1.0, 3.0)),)),
    Case("pause-supervisor", "the supervisor stands still while a broker and a replica die: they are not started again",
         (_pause("supervisor", (2.0, 3.0)), _kill("broker", 2.5, 0.5), _kill("replica", 2.5, 1.0))),
    # --- connections ---
    Case("cut-connections", "all connections to one broker are reset", (_net("cut", "broker", (0.0, 0.3), 0.3),)),
    Case("cut-all", "all connections to all brokers are reset, and none is taken for up to a second",
         (_net("cut", "brokers", (0.1, 1.0)),)),
    Case("slow-connections", "each piece of data to and from all brokers takes 50 ms more",
         (_net("slow", "brokers", (1.0, 3.0)),)),
    Case("dripping", "data comes in pieces of a few bytes", (_net("drip", "brokers", (0.5, 1.0), 0.5),)),
    Case("stalled", "connections to one broker carry nothing for a while, then all of it",
         (_net("stall", "broker", (0.5, 4.0)),)),
    Case("half-dead", "connections to one broker carry nothing and stay open; then they are reset",
         (_net("half-dead", "broker", (0.5, 4.0)),)),
    Case("deaf-broker", "one-way: what clients send to a broker does not arrive; then connections are reset",
         (_net("deaf", "broker", (0.5, 4.0)),)),
    Case("mute-broker", "one-way: what a broker answers does not arrive (acks are lost); then connections are reset",
         (_net("mute", "broker", (0.5, 4.0)),)),
    Case("strangers", "a crowd of connections sends noise, half a hello, or nothing at all",
         (Trouble(kind="strangers", target="brokers", lasts_s=(0.5, 1.5), every_s=0.3),)),
    # --- disks ---
    Case("full-disk", "one replica's disk is full", (_disk("full", "replica", (0.5, 2.5)),)),
    Case("full-disks", "all replicas' disks are full: ack 2 waits", (_disk("full", "replicas", (0.5, 2.0)),)),
    Case("failing-disk", "no sync of one replica succeeds", (_disk("failing", "replica", (0.2, 2.5)),)),
    Case("failing-disks", "no sync of any replica succeeds: ack 2 waits", (_disk("failing", "replicas", (0.2, 1.5)),)),
    Case("no-files", "one replica can open no more files", (_disk("no-files", "replica", (0.5, 2.5)),)),
    Case("lost-disk", "a replica is killed and comes back with an empty disk, always the same one",
         (_disk("wipe", "replica:0", every_s=3.0),)),
    Case("lost-files", "segment files of one replica are deleted under it",
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
    # --- in order ---
    Case("rolling-restart", "all roles are restarted one by one, as for a new version",
         (Trouble(kind="roll", every_s=0.5),)),
    Case("hand-over", "the sequencer hands over to a standby, again and again",
         (Trouble(kind="hand-over", every_s=0.7),)),
    # --- several at once ---
    Case("hand-over-and-kills", "the sequencer hands over while any process may die",
         (Trouble(kind="hand-over", every_s=1.0), _kill("any", 1.5, 0.7))),
    Case("broker-and-sequencer", "a broker and the leader die together", (_kill("broker+sequencer", 3.0),)),
    Case("zombies", "sequencer, a broker and a replica stand still at once until all are replaced, and wake up",
         (_zombie("sequencer+broker+replica"),)),
    Case("kill-in-bad-weather", "processes die while connections are slow and reset",
         (_kill("any", 1.0), _net("slow", "brokers", (0.5, 1.5), 0.5), _net("cut", "broker", (0.0, 0.2), 0.8))),
    Case("disk-and-kills", "a replica's disk is full while others die",
         (_disk("full", "replica:0", (1.0, 3.0)), _kill("replica", 2.0))),
    Case("failing-and-kills", "a replica's syncs fail while others die",
         (_disk("failing", "replica:0", (0.5, 2.0)), _kill("replica", 2.0))),
    Case("storm", "kills, pauses, a slow store, a full disk, cut and stalled connections: all at once",
         (_kill("any", 1.0), _pause("any", (0.1, 1.5), 1.0), _disk("full", "replica:0", (0.5, 1.0)),
          Trouble(kind="store-slow", lasts_s=(0.5, 1.0), every_s=1.0), _net("cut", "broker", (0.0, 0.2), 1.0),
          _net("stall", "broker", (0.2, 1.0), 1.0))),
)
# fmt: on


def find(names: list[str]) -> list[Case]:
    """The cases of these names, all without; BadValue if there is no such case."""
    known = {case.name: case for case in CASES}
    if wrong := [name for name in names if name not in known]:
        raise BadValue(f"there is no case {wrong[0]!r}", "see `embarcadero-proof chaos matrix --list`")
    return [known[name] for name in names] or list(CASES)
