"""Roles as the command line names them: `broker:<number>`, `replica:<number>` and `sequencer`, joined by commas."""

from __future__ import annotations

from typing import NamedTuple

from embarcadero.errors import BadValue
from embarcadero.limits import BROKERS_MAX, REPLICAS_MAX


class Role(NamedTuple):
    """One role of a node process: a broker, a replica, or the sequencer, which has no number."""

    broker: int | None = None
    replica: int | None = None

    def __str__(self) -> str:
        if self.replica is not None:
            return f"replica:{self.replica}"
        return "sequencer" if self.broker is None else f"broker:{self.broker}"


SEQUENCER = Role()
_DIGITS_MAX = 9  # Python refuses to read numbers of thousands of digits


def metrics_offset(role: Role, brokers: int) -> int:
    """How far a role's metrics port is from the sequencer's: brokers follow it, and replicas follow them."""
    if role.replica is not None:
        return 1 + brokers + role.replica
    return 0 if role.broker is None else 1 + role.broker


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
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS_MAX else None
    if number is not None and kind == "broker" and number < BROKERS_MAX:
        return Role(broker=number)
    if number is not None and kind == "replica" and number < REPLICAS_MAX:
        return Role(replica=number)
    raise BadValue(
        f"{text!r} is not a role",
        f"use sequencer, broker:0 to broker:{BROKERS_MAX - 1}, or replica:0 to replica:{REPLICAS_MAX - 1}, with commas",
    )
