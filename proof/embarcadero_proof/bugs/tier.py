"""Bugs injected into `embarcadero/tier/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import Bug
from embarcadero_proof.bugs.patch import Edit

_TABLE: Final = "embarcadero.tier.table:TierTable"

BUGS: Final = (
    Bug(
        "tier-blind-commit", "a job commits without a check of the frontiers", test="tests/tier/test_table.py",
        edits=(Edit(f"{_TABLE}.commit", "if now.frontiers != dict(before):", "if False:"),),
    ),
    Bug(
        "tier-commit-retries", "PyIceberg retries a lost commit on top of another", test="tests/tier/test_table.py",
        edits=(Edit(f"{_TABLE}._check_retries", 'if table.properties.get(_RETRIES) != "0":', "if False:"),),
    ),
    Bug(
        "tier-trim-before-commit", "a job trims brokers before the commit", test="tests/tier/test_job.py",
        edits=(Edit("embarcadero.tier.job:TierJob._cycle", "plan = self._plan(tier)",
                    "plan = self._plan(tier)\n        if plan.spans:\n            self._trim(tier, plan.after())"),),
    ),
)  # fmt: skip
