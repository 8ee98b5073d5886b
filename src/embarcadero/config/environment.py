"""Values of the environment, and where a file is looked for. Values are plain texts; keys know how to read them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from embarcadero.config.key import PREFIX, Key
from embarcadero.config.problems import Problem, nearest
from embarcadero.config.seeds import SEEDS
from embarcadero.config.table import KEYS, SECTIONS

FILE_NAME: Final = "embarcadero.yaml"
FILE_VARIABLE: Final = PREFIX + "CONFIG"
OTHER_VARIABLES: Final = {
    FILE_VARIABLE, PREFIX + "DEBUG", PREFIX + "STEP", PREFIX + "SPARK_PYTHON", PREFIX + "SPARK_CORES"
}  # fmt: skip
_INJECTED: Final = re.compile(r".*_SERVICE_(HOST|PORT.*)|.*_PORT_\d+_(TCP|UDP).*", re.ASCII)
"""Variables that orchestrators make up for services that are called embarcadero-something."""


class Given(NamedTuple):
    """A value as it was given, and where."""

    text: str | list[str]
    origin: str


ConfigSource = tuple[dict[str, Given], list[Problem]]


def find_file(environ: Mapping[str, str]) -> Path | None:
    """The file to read when none is named: $EMBARCADERO_CONFIG, ./embarcadero.yaml, or the one in the user's home."""
    if named := environ.get(FILE_VARIABLE):
        return Path(named)
    home = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return next((path for path in (Path(FILE_NAME), home / "embarcadero" / FILE_NAME) if path.is_file()), None)


def read_environment(environ: Mapping[str, str]) -> ConfigSource:
    """Values of all variables of ours. Unknown ones are problems if they look like ours."""
    known = {variable: key for key in KEYS.values() for variable in reversed(key.variables)}
    given: dict[str, Given] = {}
    problems: list[Problem] = []
    for key in KEYS.values():
        for variable in reversed(key.variables):
            if text := environ.get(variable):
                given[str(key)] = Given(text, f"${variable}")
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known and variable not in OTHER_VARIABLES:
            problems += _unknown_variable(variable, known)
    return given, problems


def _unknown_variable(variable: str, known: Mapping[str, Key]) -> Iterator[Problem]:
    where = f"${variable}"
    if variable in SEEDS:
        yield Problem(where, "", "is not known under this name", SEEDS[variable])
    elif _INJECTED.fullmatch(variable):
        return
    elif close := nearest(variable.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in known], 0.75):
        yield Problem(where, "", "stands for no key", f"did you mean {PREFIX}{close}?")
    elif any(variable.startswith(f"{PREFIX}{section.upper()}_") for section in SECTIONS):
        yield Problem(where, "", "stands for no key", "see `embarcadero config reference`")
