"""How many copies a topic may have, and the cost of a choice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embarcadero.cli.topic import price
from embarcadero.errors import BadValue
from embarcadero.limits import COPIES_DEFAULT, COPIES_MAX
from embarcadero.placement.topics import checked_copies


@pytest.mark.parametrize(
    ("replicas", "durable_on", "says"),
    [
        (0, 0, "memory only"),
        (1, 1, "on one disk; after a loss of memory, recovery needs its one replica"),
        (2, 1, "1 of 2 disks; after a loss of memory, recovery needs both replicas"),
        (2, 2, "all 2 disks, so the slowest one sets the pace; after a loss of memory, recovery needs any 1 of 2"),
        (3, 2, "2 of 3 disks; after a loss of memory, recovery needs any 2 of 3 replicas"),
        (3, 1, "1 of 3 disks; after a loss of memory, recovery needs all 3 replicas"),
        (5, 3, "recovery needs any 3 of 5 replicas"),
    ],
)
def test_the_cost_of_a_choice_is_described(replicas: int, durable_on: int, says: str) -> None:
    """In one sentence: on how many disks a durable record is, and how many replicas recovery needs."""
    assert says in price(replicas, durable_on)


@given(
    replicas=st.none() | st.integers(-1, COPIES_MAX + 1),
    durable_on=st.none() | st.integers(-1, COPIES_MAX + 1),
    live=st.integers(0, 10),
)
def test_copies_are_in_range_or_refused(replicas: int | None, durable_on: int | None, live: int) -> None:
    """0 <= A <= R <= maximum, and A >= 1 if R >= 1; given values are kept, the others have defaults."""
    count = min(live, COPIES_DEFAULT) if replicas is None else replicas
    enough = (count > 0) * (count // 2 + 1) if durable_on is None else durable_on
    if not (0 <= count <= COPIES_MAX and (count > 0) <= enough <= count):
        with pytest.raises(BadValue, match="use"):
            checked_copies(replicas, durable_on, live)
        return
    copies = checked_copies(replicas, durable_on, live)
    assert 0 <= copies.durable_on <= copies.replicas <= COPIES_MAX
    assert (copies.durable_on > 0) == (copies.replicas > 0)
    assert copies.replicas == (min(live, COPIES_DEFAULT) if replicas is None else replicas)
    if durable_on is None:
        assert 2 * copies.durable_on > copies.replicas or copies.replicas == 0
    else:
        assert copies.durable_on == durable_on
