"""One configuration out of all sources: defaults < file < environment < flags. All problems are found at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from embarcadero.config.environment import ConfigSource, Given, find_file, read_environment
from embarcadero.config.problems import Problem, as_error
from embarcadero.config.relations import RELATIONS
from embarcadero.config.sizes import usual_chunk_bytes
from embarcadero.config.table import DEFAULTS, KEYS, SECTIONS, Config
from embarcadero.config.units import BadQuantity

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Resolved:
    """What all sources together say."""

    values: dict[str, Any]  # by full key
    origins: dict[str, str]  # by full key: where its value came from
    problems: list[Problem]
    file: Path | None

    def config(self) -> Config:
        """The configuration; raises BadConfiguration, with all problems."""
        if self.problems:
            raise as_error(self.problems)
        return config_of(self.values)


def values_of(config: Config) -> dict[str, Any]:
    """The value of every key."""
    return {full: getattr(getattr(config, key.section), key.name) for full, key in KEYS.items()}


def config_of(values: Mapping[str, Any]) -> Config:
    """The configuration with these values."""
    sections = {
        section: kind(**{key.name: values[full] for full, key in KEYS.items() if key.section == section})
        for section, kind in SECTIONS.items()
    }
    return Config(**sections)


def resolve(
    file: Path | None = None,
    flags: Mapping[str, Given] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    base: Config = DEFAULTS,
) -> Resolved:
    """Take `base`, then the file, the environment and the flags (by full key), each over the one before."""
    found, problems = _read(file) if file else ({}, [])
    more, wrong = read_environment(environ)
    problems = [*problems, *wrong]
    values, origins = values_of(base), dict.fromkeys(KEYS, DEFAULT)
    for given in (found, more, flags or {}):
        for full, (text, origin) in given.items():
            try:
                values[full] = KEYS[full].read(text)
                origins[full] = origin
            except BadQuantity as error:
                problems.append(Problem(origin, full, error.what, error.right))
    if origins["fabric.chunk_bytes"] == DEFAULT and origins["fabric.log_bytes"] != DEFAULT:
        values["fabric.chunk_bytes"] = usual_chunk_bytes(values["fabric.log_bytes"])
    return Resolved(values, origins, problems + broken_relations(values, origins), file)


def _read(file: Path) -> ConfigSource:
    from embarcadero.config.file import read_file

    return read_file(file)


def broken_relations(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[Problem]:
    """Values that are right by themselves and wrong together, at the place where the first of them was set."""
    found = []
    for keys, holds, says in RELATIONS:
        if not holds(*(values[full] for full in keys)):
            where = next((origins[full] for full in keys if origins[full] != DEFAULT), DEFAULT)
            are = ", ".join(f"{full} is {KEYS[full].show(values[full]) or 'empty'}" for full in keys)
            found.append(Problem(where, "", are, says))
    return found


def load(
    config: str | Path | Config | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    search: bool = False,
    base: Config = DEFAULTS,
) -> Config:
    """The configuration of a program: the file `config` if named, the environment, and `flags` over both.

    A Config is taken as it is, with the flags over it. Without a file $EMBARCADERO_CONFIG names one; `search` looks in
    the usual places too. Raises BadConfiguration, with all problems.

        config = load("embarcadero.yaml", {"broker.port": 0})
    """
    given = {full: as_given(full, value) for full, value in (flags or {}).items() if value is not None}
    if isinstance(config, Config):
        return resolve(None, given, environ={}, base=config).config()
    return resolve(which_file(config, search), given, base=base).config()


def which_file(named: str | Path | None, search: bool) -> Path | None:
    """The file to read: the named one, else $EMBARCADERO_CONFIG, else (`search`) one of the usual places."""
    if named is not None:
        return Path(named)
    variable = os.environ.get("EMBARCADERO_CONFIG")
    return find_file(os.environ) if search or variable else None


def as_given(full: str, value: Any, origin: str = "") -> Given:
    """A value that a program gave, as the text that stands for it."""
    if isinstance(value, list):
        return Given([str(part) for part in value], origin or full)
    return Given(str(value), origin or full)


def encode(config: Config) -> bytes:
    """As JSON, for another process."""
    return msgspec.json.encode(config)
