"""Roles as the command line names them: `broker:<number>` and `sequencer`, joined by commas."""

from __future__ import annotations

from typing import NamedTuple

from embarcadero.errors import BadValue
from embarcadero.limits import BROKERS_MAX


class Role(NamedTuple):
    """One role of a node process. `broker` is None for the sequencer."""

    broker: int | None

    def __str__(self) -> str:
        return "sequencer" if self.broker is None else f"broker:{self.broker}"


SEQUENCER = Role(None)


def parse_roles(text: str) -> list[Role]:
    """The roles in a text such as `broker:0,broker:1,sequencer`."""
    roles = [_parse(part.strip()) for part in text.split(",")]
    if len(set(roles)) != len(roles):
        raise BadValue(f"a role is named twice in {text!r}", "name each role once")
    return roles


def _parse(text: str) -> Role:
    kind, _, number = text.partition(":")
    if text == "sequencer":
        return SEQUENCER
    if kind == "broker" and number.isascii() and number.isdigit() and int(number) < BROKERS_MAX:
        return Role(int(number))
    raise BadValue(f"{text!r} is not a role", f"use sequencer or broker:0 to broker:{BROKERS_MAX - 1}, with commas")
