"""Roles as the command line names them: `broker:<number>`, `replica:<number>` and `sequencer`, joined by commas.

More sequencers that stand by are `sequencer:1`, `sequencer:2`, ...; `sequencer` is the first of them.
"""

from __future__ import annotations

from typing import NamedTuple

from embarcadero.errors import BadValue
from embarcadero.limits import BROKERS_MAX, CANDIDATES_MAX, REPLICAS_MAX


class Role(NamedTuple):
    """One role of a node process: a broker, a replica, or a sequencer candidate."""

    broker: int | None = None
    replica: int | None = None
    candidate: int | None = None

    def __str__(self) -> str:
        if self.replica is not None:
            return f"replica:{self.replica}"
        return candidate_role(self.candidate or 0) if self.broker is None else f"broker:{self.broker}"


SEQUENCER = Role(candidate=0)


def candidate_role(candidate: int) -> str:
    """What the command line calls a sequencer candidate."""
    return f"sequencer:{candidate}" if candidate else "sequencer"


def metrics_offset(role: Role, brokers: int) -> int:
    """How far a role's metrics port is from the first sequencer's.

    Brokers follow it, then replicas; sequencers that stand by come after as many replicas as there can be.
    """
    if role.replica is not None:
        return 1 + brokers + role.replica
    if role.broker is not None:
        return 1 + role.broker
    return brokers + REPLICAS_MAX + role.candidate if role.candidate else 0


def parse_roles(text: str) -> list[Role]:
    """The roles in a text such as `broker:0,broker:1,sequencer,replica:0`."""
    roles = [_parse(part.strip()) for part in text.split(",")]
    if len(set(roles)) != len(roles):
        raise BadValue(f"a role is named twice in {text!r}", "name each role once")
    return roles


def _parse(text: str) -> Role:
    kind, _, digits = text.partition(":")
    if text == "sequencer":
        return SEQUENCER
    number = int(digits) if digits.isascii() and digits.isdigit() else None
    if number is not None and kind == "broker" and number < BROKERS_MAX:
        return Role(broker=number)
    if number is not None and kind == "replica" and number < REPLICAS_MAX:
        return Role(replica=number)
    if number is not None and kind == "sequencer" and 0 < number < CANDIDATES_MAX:
        return Role(candidate=number)
    raise BadValue(
        f"{text!r} is not a role",
        f"use sequencer, sequencer:1 to sequencer:{CANDIDATES_MAX - 1}, broker:0 to broker:{BROKERS_MAX - 1}, or "
        f"replica:0 to replica:{REPLICAS_MAX - 1}, with commas",
    )
