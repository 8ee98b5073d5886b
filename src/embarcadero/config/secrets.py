"""Values that must not be shown: which keys have them, how they are masked, and how they are kept apart.

Of `tier.properties`, names are shown and values are not, except those of a few properties that hold no secret. Any
other property may hold one: PyIceberg knows many, and plug-ins add more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from embarcadero.config.table import KEYS, Config

MASK: Final = "***"
SECRET: Final = tuple(full for full, key in KEYS.items() if key.rule.secret)
_SHOWN: Final = frozenset({
    "type", "warehouse", "s3.endpoint", "s3.region", "s3.path-style-access", "s3.connect-timeout", "client.region",
    "s3.force-virtual-addressing", "gcs.endpoint", "gcs.project-id", "adls.account-name", "py-io-impl",
})  # fmt: skip
_URI: Final = "uri"
_USER: Final = re.compile(r"(?<=://)[^/@]*@")
_SHORTEST: Final = 4
"""Shorter values are not replaced in logs: they would be found everywhere."""


def masked(full: str, value: Any) -> Any:
    """The value of a key as it may be shown: as it is, or for a key with secrets without them."""
    return list(map(_masked_pair, value)) if full in SECRET else value


def _masked_pair(pair: str) -> str:
    name, equals, value = pair.partition("=")
    if not equals:
        return MASK  # no name: it may be the second half of a value with a comma
    return f"{name}={_masked_value(name.strip().lower(), value)}"


def _masked_value(name: str, value: str) -> str:
    if name in _SHOWN:
        return value
    if name == _URI:
        return _USER.sub(f"{MASK}@", value.partition("?")[0])
    return MASK


def secret_values(config: Config) -> list[str]:
    """All texts that logs must not have, longest first."""
    found = {text for full in SECRET for pair in _value(config, full) for text in _hidden(pair)}
    return sorted((text for text in found if len(text) >= _SHORTEST), key=lambda text: (-len(text), text))


def _hidden(pair: str) -> list[str]:
    """The parts of a `name=value` pair that are masked."""
    name, equals, value = (part.strip() for part in pair.partition("="))
    if name.lower() == _URI:
        return [*(user[0][:-1].rpartition(":")[2] for user in _USER.finditer(value)), value.partition("?")[2]]
    return [] if name.lower() in _SHOWN else [value if equals else name]


def split(config: Config) -> tuple[Config, dict[str, list[str]]]:
    """A configuration without its secrets, and the secrets by key."""
    secrets = {full: _value(config, full) for full in SECRET if _value(config, full)}
    return _with(config, {full: [] for full in secrets}), secrets


def join(config: Config, secrets: Mapping[str, Sequence[str]]) -> Config:
    """The configuration that was split. Keys that are not known, or hold no secret, are left out."""
    return _with(config, {full: list(value) for full, value in secrets.items() if full in SECRET})


def _value(config: Config, full: str) -> list[str]:
    key = KEYS[full]
    return list(getattr(getattr(config, key.section), key.name))


def _with(config: Config, values: Mapping[str, list[str]]) -> Config:
    for full, value in values.items():
        key = KEYS[full]
        section = msgspec.structs.replace(getattr(config, key.section), **{key.name: value})
        config = msgspec.structs.replace(config, **{key.section: section})
    return config
