"""Style is a test: sizes, layering, banned calls, and forbidden words."""

from __future__ import annotations

import ast
import re
import statistics
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "embarcadero"
MODULES = sorted(SRC.rglob("*.py"))
PROOF = SRC.parent.parent / "proof" / "embarcadero_proof"
ALL = MODULES + sorted(PROOF.rglob("*.py"))
GENERATED = {"client/api/sync_log.py"}

LAYERS = [
    {"types", "limits", "errors", "orders", "env", "liveness", "steps", "forks"},
    {"config"},
    {"fabric", "wire"},
    {"client"},
    {"storage"},
    {"placement"},
    {"sequencer", "broker", "replica"},
    {"watch"},
    {"node"},
    {"staging"},
    {"tier"},
    {"audit"},
    {"spark"},
    {"aio", "testing"},
    {"demo"},
    {"cli"},
]
"""A module may import from its own layer and those above it in this list."""

UPWARD = {"client/reads.py": {"tier"}}
"""Readers of tables load the tier when a topic has a table: only then is PyIceberg needed."""

PURE = [
    *(SRC / "sequencer").rglob("*.py"), *(SRC / "replica").glob("*.py"), *(SRC / "broker").rglob("*.py"),
    *(SRC / "fabric").glob("*.py"),
    *(SRC / "wire").glob("*.py"), *(SRC / "storage").glob("*.py"),
    *(SRC / "client" / f"{name}.py" for name in ("publisher", "batches", "session", "subscriber", "lanes", "link")),
]  # fmt: skip
"""Role logic: it gets clock, memory and network from outside. Drivers (server.py) and real memory are not pure."""
DRIVERS = {"server.py", "shared.py", "sockets.py", "pinning.py"}
ALLOWED = {"storage/disk.py": {"os"}}  # it has the disk of the operating system, too


def _layer(part: str) -> int:
    for number, names in enumerate(LAYERS):
        if part in names:
            return number
    raise AssertionError(f"{part} is in no layer: add it to LAYERS")


def _imports(tree: ast.AST) -> set[str]:
    """First parts of our own modules that are imported: lazily and for type checking, too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("embarcadero"):
            parts = node.module.split(".")
            names = {alias.name for alias in node.names if (SRC / f"{alias.name}.py").is_file()}
            found |= {parts[1]} if len(parts) > 1 else names
    return found


def _functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: arguments, results, errors and examples may take their space."""
    first = function.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def _name(path: Path) -> str:
    return str(path.relative_to(PROOF.parent if PROOF in path.parents else SRC))


def test_the_median_module_is_under_350_lines() -> None:
    """Half of the modules are short."""
    assert statistics.median(len(path.read_text().splitlines()) for path in MODULES) < 350


@pytest.mark.parametrize("path", ALL, ids=_name)
def test_modules_and_functions_keep_their_size(path: Path) -> None:
    """No module above 800 lines (except generated ones), no function above 70 without its docstring."""
    text = path.read_text()
    long = [function.name for function in _functions(ast.parse(text)) if _code_lines(function) > 70]

    assert len(text.splitlines()) <= 800 or _name(path) in GENERATED
    assert not long


def test_almost_no_function_is_above_50_lines() -> None:
    """At most one in a hundred."""
    sizes = [_code_lines(function) for path in MODULES for function in _functions(ast.parse(path.read_text()))]

    assert sum(size > 50 for size in sizes) <= len(sizes) / 100


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_imports_follow_the_layers(path: Path) -> None:
    """A module imports only from its own layer and those above it in the list."""
    part = path.relative_to(SRC).parts[0].removesuffix(".py")
    if part == "__init__":
        return  # the public API may name everything
    above = {other for other in _imports(ast.parse(path.read_text())) if _layer(other) > _layer(part)}

    assert above == UPWARD.get(_name(path), set())


def test_the_product_does_not_know_its_proof() -> None:
    """No module of the product names the package that proves it, not even in a string."""
    assert not [_name(path) for path in MODULES if "embarcadero_proof" in path.read_text()]


@pytest.mark.parametrize("path", sorted(p for p in PURE if p.name not in DRIVERS), ids=_name)
def test_role_logic_does_not_access_the_system(path: Path) -> None:
    """No clock, no randomness, no sleeping, no files, no sockets in pure code."""
    tree = ast.parse(path.read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}

    assert not imported & {"time", "random", "socket", "asyncio", "threading", "subprocess", "os"} - ALLOWED.get(
        _name(path), set()
    )
    assert "open" not in called


@pytest.mark.parametrize("path", ALL, ids=_name)
def test_nothing_is_left_behind(path: Path) -> None:
    """No notes to self, no bare asserts (`python -O` strips them), a docstring for every module."""
    text = path.read_text()
    tree = ast.parse(text)

    assert not re.search(r"\b(TODO|FIXME|XXX)\b|NotImplementedError", text)
    assert ast.get_docstring(tree) or not tree.body
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
