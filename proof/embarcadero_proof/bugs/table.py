"""All injected bugs by name, and their injection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from embarcadero.errors import BadValue
from embarcadero_proof.bugs import broker, client, fabric, memory, placement, replica, sequencer, staging, storage, tier
from embarcadero_proof.bugs.bug import Bug
from embarcadero_proof.bugs.leaks import Wrap, wrap_with
from embarcadero_proof.bugs.patch import Edit, patched
from embarcadero_proof.sim.durable import Bias

BUGS: Final[dict[str, Bug]] = {
    bug.name: bug
    for module in (broker, client, fabric, memory, placement, replica, sequencer, staging, storage, tier)
    for bug in module.BUGS
}  # fmt: skip


_BY_ROUNDS: Final = Edit(
    "embarcadero.sequencer.order.batches:order_one", "    row = session", "    return None\n    row = session"
)
"""Makes rounds of one batch run the code of larger rounds, where most bugs are injected."""
ACTIVE: Final[set[str]] = set()
"""Names of the bugs that are injected now."""


def is_injected(name: str) -> bool:
    """Whether this bug is injected now: for models of a role, which omit a rule themselves."""
    return name in ACTIVE


def bias_of(names: Sequence[str]) -> Bias | None:
    """Return the kind of run that looks for these bugs."""
    return next((BUGS[name].bias for name in names if name in BUGS and BUGS[name].bias is not None), None)


@contextmanager
def injected(*names: str) -> Iterator[Wrap]:
    """Inject these bugs while the block runs. Yields the wrapper for fabrics of roles. BadValue for an unknown name."""
    if unknown := [name for name in names if name not in BUGS]:
        raise BadValue(f"there are no injected bugs with the names {unknown}", f"choose from {sorted(BUGS)}")
    chosen = [BUGS[name] for name in names]
    ACTIVE.update(names)
    try:
        by_rounds = [_BY_ROUNDS] if any(bug.leak is None for bug in chosen) else []
        with patched([*by_rounds, *(edit for bug in chosen for edit in bug.edits)]):
            yield wrap_with([bug.leak for bug in chosen if bug.leak is not None])
    finally:
        ACTIVE.difference_update(names)
