"""The table of steps and the code agree."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from embarcadero.steps import BY_NAME, Step

SRC = Path(__file__).parent.parent / "src" / "embarcadero"
FOLDERS = ("sequencer", "broker", "replica", "fabric")


def _reached() -> Counter[str]:
    """The steps that role code reaches, and the number of their places."""
    found: Counter[str] = Counter()
    for path in (path for folder in FOLDERS for path in (SRC / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "at"):
                continue
            if node.args and isinstance(node.args[0], ast.Attribute) and ast.unparse(node.args[0]).startswith("Step."):
                found[node.args[0].attr] += 1
    return found


def test_each_step_is_a_point_in_role_code() -> None:
    """No name of the table is unused, and every used name is in the table."""
    assert set(_reached()) == {step.name for step in Step}


def test_names_are_words_with_dots() -> None:
    """A group, a dot, and a fact; the constant is the same in capitals."""
    for name, step in BY_NAME.items():
        assert step == name
        assert step.name == name.upper().replace(".", "_").replace("-", "_")
        assert step.role in {"sequencer", "broker", "replica"}
        assert step.truth
