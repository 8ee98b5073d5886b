"""Secret values: which keys have them, how they are masked, and how they are stored separately.

For `tier.properties`, names are shown and values are masked. Exceptions are a few properties whose only secrets are the
user and the query of a URL. Any other property may be a secret: PyIceberg knows many, and plug-ins add more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from embarcadero.config.table import KEYS, Config
from embarcadero.errors import BadValue
from embarcadero.limits import TIER_TEXT_BYTES_MAX

MASK: Final = "***"
SECRET: Final = tuple(full for full, key in KEYS.items() if key.rule.secret)
_SHOWN: Final = frozenset({
    "type", "uri", "warehouse", "s3.endpoint", "s3.region", "s3.path-style-access", "s3.connect-timeout",
    "client.region", "s3.force-virtual-addressing", "gcs.endpoint", "gcs.project-id", "adls.account-name", "py-io-impl",
})  # fmt: skip
_PUBLIC: Final = frozenset((
    "s3.endpoint", "s3.region", "s3.force-virtual-addressing", "s3.path-style-access", "s3.anonymous",
    "gcs.service.host", "gcs.project-id", "adls.account-name", "adls.account-host", "client.region",
))  # fmt: skip
_WAREHOUSE: Final = "tier.warehouse"
_SHORTEST: Final = 4
"""Shorter values are not masked in logs: they would match too often."""


def masked(full: str, value: Any) -> Any:
    """Return the value of a key without its secrets."""
    if full == _WAREHOUSE:
        return _masked_value("warehouse", value)
    return list(map(_masked_pair, value)) if full in SECRET else value


def _masked_pair(pair: str) -> str:
    name, equals, value = pair.partition("=")
    if not equals:
        return MASK  # no name: it may be the second half of a value with a comma
    return f"{name}={_masked_value(name.strip().lower(), value)}"


def _masked_value(name: str, value: str) -> str:
    if name not in _SHOWN:
        return MASK
    scheme, user, place = split_user(value)
    if "?" in user:  # in a password, or in a query with an @: the end of the secret is unknown
        return f"{scheme}{MASK}"
    return f"{scheme}{MASK if user else ''}{'@' if user else ''}{place.partition('?')[0]}"


def split_user(url: str) -> tuple[str, str, str]:
    """Split a URL into its scheme (with `://`), its user with the password, and the rest after their `@`.

    The user ends at the last `@`, also after a `/` or `?`: SQLAlchemy accepts these characters in passwords, and people
    forget to encode an `@`. If the user has a `?`, it may be a location and part of a query instead.
    """
    scheme, there, rest = url.partition("://") if "://" in url else ("", "", url)
    if rest.startswith("/"):
        return f"{scheme}{there}", "", rest  # a path
    user, _, place = rest.rpartition("@")
    return f"{scheme}{there}", user, place


def secret_values(config: Config) -> list[str]:
    """Return all texts that must not appear in logs, longest first."""
    pairs = [f"warehouse={config.tier.warehouse}", *(pair for full in SECRET for pair in _value(config, full))]
    found = {text for pair in pairs for text in _hidden(pair)}
    return sorted((text for text in found if len(text) >= _SHORTEST), key=lambda text: (-len(text), text))


def _hidden(pair: str) -> list[str]:
    """Return the masked parts of a `name=value` pair, for each possible reading of a URL."""
    name, equals, value = (part.strip() for part in pair.partition("="))
    if name.lower() not in _SHOWN:
        return [value if equals else name]
    found = []
    for url in (value, value.partition("?")[0]):
        _, user, place = split_user(url)
        password = user.partition(":")[2] or user
        found += [password, unquote(password), place.partition("?")[2]]
    return [*found, value.partition("?")[2]]


def split(config: Config) -> tuple[Config, dict[str, list[str]]]:
    """Split a configuration into one without secrets, and the secrets by key."""
    secrets = {full: _value(config, full) for full in SECRET if _value(config, full)}
    return _with(config, {full: [] for full in secrets}), secrets


def join(config: Config, secrets: Mapping[str, Sequence[str]]) -> Config:
    """Restore a configuration from `split`. Unknown keys, and keys without secrets, are ignored."""
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


def public_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of a store that every client may know: its location, no secrets, no user of an endpoint."""
    found: dict[str, str] = {}
    for key in sorted(_PUBLIC & properties.keys()):
        scheme, user, place = split_user(properties[key])
        value = "" if "?" in user else f"{scheme}{place}"
        if value and len(value.encode()) <= TIER_TEXT_BYTES_MAX:
            found[key] = value
    return found


def parse_properties(pairs: Sequence[str], what: str = "tier.properties") -> dict[str, str]:
    """Parse `key=value` pairs. Raises BadValue with the number of a wrong entry."""
    found: dict[str, str] = {}
    for number, pair in enumerate(pairs, start=1):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():  # it may be a part of a secret, so it is not shown
            hint = "write key=value, such as s3.region=eu-west-1; a value with a comma needs a list in the file"
            raise BadValue(f"{what} has {len(pairs)} entries, and number {number} is not a key=value pair", hint)
        found[key.strip()] = value.strip()
    return found
