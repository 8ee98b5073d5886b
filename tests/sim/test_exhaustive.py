"""All interleavings of small scopes: they hold, and every step left out has a counterexample."""

from __future__ import annotations

import pytest

from embarcadero_proof.bugs.table import ACTIVE
from embarcadero_proof.sim.exhaustive.scopes import CASES, VARIANTS, explore_case

_CASES = [name for name, case in CASES.items() if case.small]
_VARIANTS = [name for name, variant in VARIANTS.items() if variant.small]


@pytest.mark.parametrize("name", _CASES)
def test_a_scope_holds(name: str) -> None:
    """No order of steps, write-backs and crashes violates an invariant."""
    report = explore_case(CASES[name])

    assert not report.wrong, "\n".join(report.story)
    assert report.states > 10


@pytest.mark.parametrize("name", _VARIANTS)
def test_every_step_is_needed(name: str) -> None:
    """With the step left out there is a counterexample, and its story is printed; nothing stays injected."""
    variant = VARIANTS[name]
    report = explore_case(CASES[variant.case], variant)

    assert report.wrong
    assert report.story
    assert not ACTIVE
