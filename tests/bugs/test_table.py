"""Every injected bug fits the source of the product."""

from __future__ import annotations

from itertools import groupby

import pytest

from embarcadero_proof.bugs.bug import Bug
from embarcadero_proof.bugs.patch import patched_code
from embarcadero_proof.bugs.table import BUGS


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_bug_fits_the_source(bug: Bug) -> None:
    """Its functions exist and contain the replaced text exactly once; it has a place, and a test that catches it."""
    for _, edits in groupby(sorted(bug.edits, key=lambda edit: edit.where), key=lambda edit: edit.where):
        patched_code(list(edits))
    assert bug.by or bug.scope or bug.test
