"""The notebook runs without Jupyter and shows the stored outputs."""

from __future__ import annotations

import ast
import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest

from tests.examples.test_examples import EXAMPLES

pytestmark = pytest.mark.system

NOTEBOOK = EXAMPLES / "tour.ipynb"


def execute(source: str, namespace: dict[str, Any]) -> list[str]:
    """Run a cell as Jupyter does. Return the printed text and the value of the last expression, if there are any."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(tree, NOTEBOOK.name, "exec"), namespace)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), namespace)
    return [text for text in (printed.getvalue(), "" if value is None else repr(value)) if text]


def stored(outputs: list[dict[str, Any]]) -> list[str]:
    """Return the outputs of a cell in the file, as text."""
    return ["".join(output["text"] if "text" in output else output["data"]["text/plain"]) for output in outputs]


def test_the_notebook_runs_and_shows_its_outputs() -> None:
    """All cells of one notebook share a namespace. Its private cluster ends with the last cell."""
    notebook, namespace = json.loads(NOTEBOOK.read_text()), dict[str, Any]()
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    try:
        for cell in cells:
            assert execute("".join(cell["source"]), namespace) == stored(cell["outputs"]), cell["id"]
        assert namespace["log"].ended
    finally:
        if "log" in namespace:
            namespace["log"].close()

    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    assert sum(bool(cell["outputs"]) for cell in cells) >= 5
