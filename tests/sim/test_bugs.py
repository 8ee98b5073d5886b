"""Every injected bug is caught by the checker for its promise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embarcadero.errors import BadValue
from embarcadero_proof.bugs.bug import ROLE
from embarcadero_proof.bugs.table import ACTIVE, BUGS, injected
from embarcadero_proof.sim.checkers import CHECKERS, check_all
from embarcadero_proof.sim.exhaustive.scopes import VARIANTS
from embarcadero_proof.sim.history import Ended, History, RoleFailed, Sent
from embarcadero_proof.sim.run import BugReport, BugsReport, caught_by, hunt, hunt_all

SEEDS = 40


IMPORTANT = (
    "missing-flush", "missing-invalidate", "lane-ack-unchecked", "frontier-before-entries", "dedupe-off",
    "durable-before-sync", "ack-before-durable", "serve-above-durable", "old-range-counts", "damage-cut",
    "failover-statistic", "positions-reused", "too-few-replies", "append-time-goes-back", "end-recorded-low",
    "cut-left-out", "gap-stops-all", "connections-left", "loss-not-reported", "end-unconfirmed", "claimed-number-moved",
    "unknown-as-failed", "weak-held", "strong-forgotten-at-replay", "late-trim-done", "deleted-memory-left",
    "reference-unchecked", "reference-not-durable",
)  # fmt: skip
"""One of each kind, and for each promise a bug that only its checker detects.

`make bugs` runs all of them; those of small scopes are in test_exhaustive.py too.
"""


@pytest.mark.timeout(900)
def test_injected_bugs_are_caught() -> None:
    """Each injected bug breaks its promise in a run that keeps all promises without it; and no checker is superfluous.

    Seeds that are known to catch a bug come first; others are tried only if none of those catches it any more.
    """
    found = BugsReport(bugs=list(hunt_all(seeds=SEEDS, names=IMPORTANT)))
    assert {bug.name for bug in found.bugs} == set(IMPORTANT)
    assert {bug.name: bug.broken for bug in found.bugs if not bug.caught} == {}
    assert not found.idle


def test_another_checker_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug counts as caught only if its own promise is the broken one."""
    assert hunt("dedupe-off", seeds=0).caught
    monkeypatch.setitem(BUGS, "dedupe-off", replace(BUGS["dedupe-off"], by="P2, P7"))
    found = hunt("dedupe-off", seeds=0)
    assert not found.caught
    assert "P2" in found.broken
    assert not BugsReport(bugs=[found]).good


def test_a_superfluous_checker_is_reported() -> None:
    """All bugs are caught, but one promise is never the only broken one: that is not enough."""
    every = [BugReport(name=promise, seed=0, promise=promise, broken={promise: 1}) for promise in CHECKERS]
    assert BugsReport(bugs=every).good
    every[4].broken = {"P5": 1, "P2": 1}
    assert BugsReport(bugs=every).idle == ["P5"]
    assert not BugsReport(bugs=every).good


def test_a_role_that_fails_is_not_a_checker_of_promises() -> None:
    """Errors that a role detects by itself are distinguished from calls that do not end."""
    failed = RoleFailed(at=1, process="sequencer-1", error="Corrupt: a hole")
    assert [*caught_by(History([failed]), check_all(History([failed])))] == [ROLE]
    sent = Sent(at=2, process="s.1", stream="s", lane=0, number=0, digest=1)
    history = History([failed, sent, Ended(at=3)])
    assert {*caught_by(history, check_all(history))} == {ROLE, "P8"}


def test_the_table_is_complete() -> None:
    """Each injected bug has a patch point, and a seed or a scope that catches it; scopes can leave it out."""
    for name, bug in BUGS.items():
        assert bug.where
        assert bug.witnesses or bug.scope or bug.test
        assert bool(bug.witnesses) == bool(bug.by)
        assert {*bug.checkers} <= {*CHECKERS, ROLE}
        assert not bug.scope or VARIANTS[name].case == bug.scope


def test_nothing_is_injected_unless_requested() -> None:
    """Injected bugs are gone when their run is over, even if it failed."""
    with pytest.raises(BadValue), injected("dedupe-off"):
        raise BadValue(f"injected: {sorted(ACTIVE)}")
    assert not ACTIVE


def test_an_unknown_bug_is_refused() -> None:
    """A misspelt name is an error, not a bug that is never injected."""
    with pytest.raises(BadValue, match="no-such-bug"), injected("no-such-bug"):
        pass
