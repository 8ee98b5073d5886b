"""Values of a YAML file, with the line of each. Values are plain texts; keys know how to read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import yaml

from embarcadero.config.environment import ConfigSource, Given
from embarcadero.config.key import Key, Kind
from embarcadero.config.problems import Problem, nearest
from embarcadero.config.seeds import SEEDS
from embarcadero.config.table import KEYS, SECTIONS
from embarcadero.limits import CONFIG_BRACKETS_MAX, CONFIG_BYTES_MAX


def read_file(path: Path) -> ConfigSource:
    """Values of a YAML file with a mapping of sections, each a mapping of keys."""
    try:
        with path.open("rb") as file:
            content = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        return {}, [Problem(str(path), "", f"can't be read: {error.strerror}", "name a file that exists and is yours")]
    if len(content) > CONFIG_BYTES_MAX:
        return {}, [Problem(str(path), "", f"has more than {CONFIG_BYTES_MAX} bytes", "is it a configuration?")]
    if content.count(b"[") + content.count(b"{") > CONFIG_BRACKETS_MAX:
        what = f"opens more than {CONFIG_BRACKETS_MAX} brackets"
        return {}, [Problem(str(path), "", what, "write lists with a line for each item")]
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
        """An unknown section: its keys may be known by names of the first designs."""
        self._problem(node, section, "is no section", right)
        if isinstance(value, yaml.MappingNode):
            for name, key_node, _ in self._pairs(value, section, "keys"):
                if told := SEEDS.get(f"{section}.{name}"):
                    self._problem(key_node, f"{section}.{name}", "is not known under this name", told)

    def _keys(self, section: str, node: yaml.Node) -> None:
        names = {key.name for key in KEYS.values() if key.section == section}
        for name, key_node, value in self._pairs(node, section, "keys with values"):
            full = f"{section}.{name}"
            if name not in names:
                self._unknown_key(key_node, full, name, names)
            elif full in self._given:
                self._problem(key_node, full, "is there twice", f"the first is in {self._given[full].origin}")
            else:
                self._value(KEYS[full], value)

    def _unknown_key(self, node: yaml.Node, full: str, name: str, names: set[str]) -> None:
        elsewhere = nearest(full, KEYS, 0.8) or next((key for key in KEYS if key.endswith(f".{name}")), None)
        if told := SEEDS.get(full):
            self._problem(node, full, "is not known under this name", told)
        elif (close := nearest(name, names)) or elsewhere:
            wanted = f"{full.partition('.')[0]}.{close}" if close else elsewhere
            self._problem(node, full, "is no key", f"did you mean {wanted}?")
        else:
            self._problem(node, full, "is no key", f"keys here are {', '.join(sorted(names))}")

    def _value(self, key: Key, node: yaml.Node) -> None:
        if _is_null(node):
            self._problem(node, str(key), "has no value", "give one, or remove the line for the default")
        elif _is_scalar(node):
            text = node.value
            if key.rule.kind is Kind.PATH and text and not text.startswith("~"):
                text = str(self._path.absolute().parent / text)
            self._given[str(key)] = Given(text, self._at(node))
        elif isinstance(node, yaml.SequenceNode) and all(map(_is_scalar, node.value)):
            self._given[str(key)] = Given([part.value for part in node.value], self._at(node))
        else:
            self._problem(node, str(key), "is no single value", f"write one, such as {key.show(key.default) or 'text'}")

    def _pairs(self, node: yaml.Node, key: str, wanted: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            self._problem(node, key, "is no mapping", f"write {wanted}")
            return
        for name, value in node.value:
            if _is_scalar(name):
                yield name.value, name, value
            else:
                self._problem(name, key, "has a name that is no text", f"write {wanted}")


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


def _is_scalar(node: yaml.Node) -> TypeGuard[yaml.ScalarNode]:
    return isinstance(node, yaml.ScalarNode) and not _is_null(node)
