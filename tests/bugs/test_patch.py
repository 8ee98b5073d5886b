"""An injected bug replaces text of one function while a block runs, and fails when the source has changed."""

from __future__ import annotations

import pytest

from embarcadero_proof.bugs.patch import Edit, SourceMoved, patched
from tests.bugs import example
from tests.bugs.example import double

HERE = "tests.bugs.example"


def test_every_reference_runs_the_patched_code_until_the_end_of_the_block() -> None:
    """Also a reference that was imported by name before."""
    with patched([Edit(f"{HERE}:double", "number * 2", "number * 3")]):
        assert (double(2), example.double(2)) == (6, 6)
    assert (double(2), example.double(2)) == (4, 4)


def test_methods_properties_static_methods_and_decorated_functions_are_patched() -> None:
    """Whatever wraps the function."""
    counter = example.Counter()
    with patched([
        Edit(f"{HERE}:Counter.add", "+= number", "+= number + 1"),
        Edit(f"{HERE}:Counter.negative", "-self.count", "self.count"),
        Edit(f"{HERE}:Counter.zero", "return 0", "return 7"),
        Edit(f"{HERE}:one", "yield 1", "yield 2"),
    ]):  # fmt: skip
        counter.add(1)
        with example.one() as value:
            assert (counter.negative, counter.zero(), value) == (2, 7, 2)
    assert (counter.negative, counter.zero()) == (-2, 0)


def test_edits_of_one_function_add_up() -> None:
    """Two bugs may be in one function."""
    where = f"{HERE}:Counter.add"
    with patched([Edit(where, "+= number", "+= number + 2"), Edit(where, "number + 2", "number + 4")]):
        counter = example.Counter()
        counter.add(1)
    assert counter.count == 5


@pytest.mark.parametrize(
    ("where", "old"),
    [
        (f"{HERE}:double", "number * 4"),
        (f"{HERE}:double", "number"),
        (f"{HERE}:triple", "number"),
        (f"{HERE}:Counter.subtract", "number"),
        (f"{HERE}:Counter", "count"),
    ],
)
def test_a_patch_that_does_not_fit_fails_loudly(where: str, old: str) -> None:
    """Text that does not occur exactly once, or a name that is not a function; then nothing is patched."""
    good = Edit(f"{HERE}:double", "number * 2", "number * 3")
    with pytest.raises(SourceMoved), patched([good, Edit(where, old, "0")]):
        pass
    assert double(2) == 4
