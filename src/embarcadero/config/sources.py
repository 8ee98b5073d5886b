"""One configuration from all sources: defaults < file < environment < flags. All problems are reported together.

File and environment provide texts and their origins. Keys parse the texts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeGuard

import msgspec

from embarcadero.config.key import PREFIX, BadQuantity, Key, Kind
from embarcadero.config.table import DEFAULTS, KEYS, RELATIONS, SECTIONS, SEEDS, Config, usual_chunk_bytes
from embarcadero.errors import BadConfiguration
from embarcadero.limits import CONFIG_BRACKETS_MAX, CONFIG_BYTES_MAX

if TYPE_CHECKING:
    import yaml


# --- problems ---------------------------------------------------------------------------------------------------------
class Problem(NamedTuple):
    """A problem of the configuration."""

    where: str  # file:line, a variable, a flag
    key: str  # empty if the problem concerns a whole source
    what: str
    right: str

    def __str__(self) -> str:
        subject = f"{self.where}: {self.key}" if self.key and self.key != self.where else self.where
        return f"{subject}: {self.what}; {self.right}"


def as_error(problems: Sequence[Problem]) -> BadConfiguration:
    """Combine all problems into one error."""
    if len(problems) == 1:
        message = str(problems[0])
    else:
        message = "\n".join([f"the configuration has {len(problems)} problems:", *(f"  {one}" for one in problems)])
    return BadConfiguration(message, "`embarcadero config reference` lists every key")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to an unknown one."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


# --- the environment --------------------------------------------------------------------------------------------------
FILE_NAME: Final = "embarcadero.yaml"
FILE_VARIABLE: Final = PREFIX + "CONFIG"
OTHER_VARIABLES: Final = {
    FILE_VARIABLE, PREFIX + "DEBUG", PREFIX + "STEP", PREFIX + "SPARK_PYTHON", PREFIX + "SPARK_CORES"
}  # fmt: skip
_INJECTED: Final = re.compile(r".*_SERVICE_(HOST|PORT.*)|.*_PORT_\d+_(TCP|UDP).*", re.ASCII)
"""Variables that orchestrators set for services whose name begins with embarcadero."""


class Given(NamedTuple):
    """The text of a value, and its origin."""

    text: str | list[str]
    origin: str


ConfigSource = tuple[dict[str, Given], list[Problem]]


def find_file(environ: Mapping[str, str]) -> Path | None:
    """Find the default file: $EMBARCADERO_CONFIG, ./embarcadero.yaml, or the file in the user's home."""
    if named := environ.get(FILE_VARIABLE):
        return Path(named)
    home = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return next((path for path in (Path(FILE_NAME), home / "embarcadero" / FILE_NAME) if path.is_file()), None)


def read_environment(environ: Mapping[str, str]) -> ConfigSource:
    """Read the values of all EMBARCADERO_ variables. Unknown ones are problems if they resemble a key."""
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
        yield Problem(where, "", "is an old name", SEEDS[variable])
    elif _INJECTED.fullmatch(variable):
        return
    elif close := nearest(variable.removeprefix(PREFIX), [name.removeprefix(PREFIX) for name in known], 0.75):
        yield Problem(where, "", "does not belong to a key", f"did you mean {PREFIX}{close}?")
    elif any(variable.startswith(f"{PREFIX}{section.upper()}_") for section in SECTIONS):
        yield Problem(where, "", "does not belong to a key", "see `embarcadero config reference`")


# --- the file ---------------------------------------------------------------------------------------------------------
def read_file(path: Path) -> ConfigSource:
    """Read a YAML file: a mapping of sections, each of them a mapping of keys."""
    import yaml  # slow to load, and most processes read no file

    try:
        with path.open("rb") as file:
            content = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        return {}, [Problem(str(path), "", f"can't be read: {error.strerror}", "check the path and its permissions")]
    if len(content) > CONFIG_BYTES_MAX:
        what = f"has more than {CONFIG_BYTES_MAX} bytes"
        return {}, [Problem(str(path), "", what, "check that it is a configuration file")]
    if content.count(b"[") + content.count(b"{") > CONFIG_BRACKETS_MAX:
        what = f"opens more than {CONFIG_BRACKETS_MAX} brackets"
        return {}, [Problem(str(path), "", what, "write lists with one line per item")]
    try:
        root = yaml.compose(content, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        return {}, [Problem(f"{path}{line}", "", f"is not YAML: {error.problem}", "see the example in the docs")]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        return {}, [Problem(str(path), "", f"is not YAML: {str(error).splitlines()[0]}", "see the example in the docs")]
    return _File(path).read(root)


class _File:
    """Collects the values and problems of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._given: dict[str, Given] = {}
        self._problems: list[Problem] = []

    def read(self, root: yaml.Node | None) -> ConfigSource:
        if root is not None and not _is_null(root):
            self._sections(root)
        return self._given, self._problems

    def _problem(self, node: yaml.Node, key: str, what: str, right: str) -> None:
        self._problems.append(Problem(self._at(node), key, what, right))

    def _at(self, node: yaml.Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"

    def _sections(self, root: yaml.Node) -> None:
        for name, key_node, value in self._pairs(root, "", "sections, such as `broker:`"):
            if name not in SECTIONS:
                close = nearest(name, SECTIONS)
                right = f"did you mean {close}?" if close else f"sections are {', '.join(SECTIONS)}"
                self._seeds_or_unknown(key_node, value, name, right)
            elif not _is_null(value):
                self._keys(name, value)

    def _seeds_or_unknown(self, node: yaml.Node, value: yaml.Node, section: str, right: str) -> None:
        """Report an unknown section, and those of its keys that are names of the first designs."""
        self._problem(node, section, "is not a section", right)
        if _is_mapping(value):
            for name, key_node, _ in self._pairs(value, section, "keys"):
                if became := SEEDS.get(f"{section}.{name}"):
                    self._problem(key_node, f"{section}.{name}", "is an old name", became)

    def _keys(self, section: str, node: yaml.Node) -> None:
        names = {key.name for key in KEYS.values() if key.section == section}
        for name, key_node, value in self._pairs(node, section, "keys with values"):
            full = f"{section}.{name}"
            if name not in names:
                self._unknown_key(key_node, full, name, names)
            elif full in self._given:
                first = self._given[full].origin
                self._problem(key_node, full, "occurs twice", f"remove one; the first is in {first}")
            else:
                self._value(KEYS[full], value)

    def _unknown_key(self, node: yaml.Node, full: str, name: str, names: set[str]) -> None:
        elsewhere = nearest(full, KEYS, 0.8) or next((key for key in KEYS if key.endswith(f".{name}")), None)
        if became := SEEDS.get(full):
            self._problem(node, full, "is an old name", became)
        elif (close := nearest(name, names)) or elsewhere:
            wanted = f"{full.partition('.')[0]}.{close}" if close else elsewhere
            self._problem(node, full, "is not a key", f"did you mean {wanted}?")
        else:
            self._problem(node, full, "is not a key", f"use one of {', '.join(sorted(names))}")

    def _value(self, key: Key, node: yaml.Node) -> None:
        if _is_null(node):
            self._problem(node, str(key), "has no value", "write a value, or remove the line for the default")
        elif _is_scalar(node):
            text = node.value
            if key.rule.kind is Kind.PATH and text and not text.startswith("~"):
                text = str(self._path.absolute().parent / text)
            self._given[str(key)] = Given(text, self._at(node))
        elif _is_list(node) and all(map(_is_scalar, node.value)):
            self._given[str(key)] = Given([part.value for part in node.value], self._at(node))
        else:
            example = key.show(key.default) or "text"
            self._problem(node, str(key), "is not a single value", f"write a single value, such as {example}")

    def _pairs(self, node: yaml.Node, key: str, wanted: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        if not _is_mapping(node):
            self._problem(node, key, "is not a mapping", f"write {wanted}")
            return
        for name, value in node.value:
            if _is_scalar(name):
                yield name.value, name, value
            else:
                self._problem(name, key, "has a name that is not text", f"write {wanted}")


def _kind(node: yaml.Node) -> str:
    kind: str = node.id  # type: ignore[attr-defined]  # PyYAML's types lack it
    return kind


def _is_null(node: yaml.Node) -> bool:
    return _kind(node) == "scalar" and node.tag == "tag:yaml.org,2002:null"


def _is_scalar(node: yaml.Node) -> TypeGuard[yaml.ScalarNode]:
    return _kind(node) == "scalar" and not _is_null(node)


def _is_list(node: yaml.Node) -> TypeGuard[yaml.SequenceNode]:
    return _kind(node) == "sequence"


def _is_mapping(node: yaml.Node) -> TypeGuard[yaml.MappingNode]:
    return _kind(node) == "mapping"


# --- all sources together ---------------------------------------------------------------------------------------------
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Resolved:
    """The combined values of all sources."""

    values: dict[str, Any]  # by full key
    origins: dict[str, str]  # by full key: the origin of its value
    problems: list[Problem]
    file: Path | None

    def config(self) -> Config:
        """Return the configuration. Raises BadConfiguration with all problems."""
        if self.problems:
            raise as_error(self.problems)
        return config_of(self.values)


def values_of(config: Config) -> dict[str, Any]:
    """Return the value of every key."""
    return {full: getattr(getattr(config, key.section), key.name) for full, key in KEYS.items()}


def config_of(values: Mapping[str, Any]) -> Config:
    """Create the configuration with these values."""
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
    """Combine `base`, the file, the environment and the flags (by full key). A later source takes precedence."""
    found, problems = read_file(file) if file else ({}, [])
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


def broken_relations(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[Problem]:
    """Report values that contradict each other, with the origin of the first of them."""
    found = []
    for keys, holds, message in RELATIONS:
        if not holds(*(values[full] for full in keys)):
            where = next((origins[full] for full in keys if origins[full] != DEFAULT), DEFAULT)
            are = ", ".join(f"{full} is {KEYS[full].show(values[full]) or 'empty'}" for full in keys)
            found.append(Problem(where, "", are, message))
    return found


def load(
    config: str | Path | Config | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    search: bool = False,
    base: Config = DEFAULTS,
) -> Config:
    """Load the configuration of a program: the file `config`, the environment, and `flags`. Later ones take precedence.

    Args:
        config: A path. None: the file in $EMBARCADERO_CONFIG, if set. A `Config` replaces file and environment.
        flags: Values by full key. None values are ignored.
        search: Also look for a file in the usual folders.
        base: The defaults.

    Raises:
        BadConfiguration: Values are not valid. The message has all problems.

    Example:
        config = load("embarcadero.yaml", {"broker.port": 0})
    """
    given = {full: as_given(full, value) for full, value in (flags or {}).items() if value is not None}
    if isinstance(config, Config):
        return resolve(None, given, environ={}, base=config).config()
    return resolve(which_file(config, search), given, base=base).config()


def which_file(named: str | Path | None, search: bool) -> Path | None:
    """Return the file to read: the named one, else $EMBARCADERO_CONFIG, else (`search`) a file in the usual folders."""
    if named is not None:
        return Path(named)
    variable = os.environ.get("EMBARCADERO_CONFIG")
    return find_file(os.environ) if search or variable else None


def as_given(full: str, value: Any, origin: str = "") -> Given:
    """Convert a value of a program to text."""
    if isinstance(value, list):
        return Given([str(part) for part in value], origin or full)
    return Given(str(value), origin or full)


def encode(config: Config) -> bytes:
    """Encode the configuration as JSON, for another process."""
    return msgspec.json.encode(config)
