"""Measures of the product's structure: sizes, duplicate names, import cycles, the files that one record crosses.

`embarcadero-proof structure` prints them; tests/test_tidy.py keeps them from growing.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import embarcadero

PACKAGE: Final = Path(embarcadero.__file__).parent
ATTRIBUTES_MAX: Final = 25
PARAMETERS_MAX: Final = 7
FAULTS: Final = re.compile(r"EMBARCADERO_(STEP|FAIL)\w*")
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_ALIAS_VALUES: Final = (ast.Subscript, ast.BinOp)


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the product."""

    name: str
    path: Path
    text: str
    tree: ast.Module = field(repr=False)


@dataclass(frozen=True, slots=True)
class Measures:
    """Measures of the product's structure."""

    modules: int
    lines: int
    wide_classes: dict[str, int]  # attributes by class, of those above ATTRIBUTES_MAX
    long_constructors: dict[str, int]  # parameters by class, of those above PARAMETERS_MAX
    shared_names: dict[str, list[str]]  # modules by class or alias name, of names with several
    cycles: list[list[str]]  # modules that import each other, one list for each cycle
    injected: int  # modules that check for injected bugs
    faults: int  # modules that read variables of fault injection
    skips: int  # lines that the formatter skips

    def table(self) -> list[tuple[str, str]]:
        """Return a row for each measure."""
        return [
            ("modules", f"{self.modules}"),
            ("lines in the wheel", f"{self.lines:,}"),
            (f"classes with more than {ATTRIBUTES_MAX} attributes", _list(self.wide_classes)),
            (f"constructors with more than {PARAMETERS_MAX} parameters", _list(self.long_constructors)),
            ("names of classes and aliases with several meanings", _list(self.shared_names)),
            ("modules in import cycles", f"{sum(map(len, self.cycles))} {self.cycles or ''}"),
            ("modules that know injected bugs", f"{self.injected}"),
            ("modules that read fault variables", f"{self.faults}"),
            ("lines with fmt: skip", f"{self.skips}"),
        ]


def _list(found: dict[str, int] | dict[str, list[str]]) -> str:
    return f"{len(found)} {', '.join(sorted(found))}".strip()


def modules(package: Path = PACKAGE) -> list[Module]:
    """Read all modules of a package."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        text = path.read_text()
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, text, ast.parse(text)))
    return found


def measures(package: Path = PACKAGE) -> Measures:
    """Measure a package."""
    found = modules(package)
    classes = [(module, node) for module in found for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    wide = {node.name: len(attributes(node)) for _, node in classes}
    long = {node.name: parameters(node) for _, node in classes}
    text = "\n".join(module.text for module in found)
    return Measures(
        modules=len(found),
        lines=sum(len(module.text.splitlines()) for module in found),
        wide_classes={name: count for name, count in wide.items() if count > ATTRIBUTES_MAX},
        long_constructors={name: count for name, count in long.items() if count > PARAMETERS_MAX},
        shared_names=shared_names(found),
        cycles=cycles(found),
        injected=sum("planted(" in module.text for module in found),
        faults=sum(bool(FAULTS.search(module.text)) for module in found),
        skips=text.count("# fmt: skip"),
    )


def attributes(node: ast.ClassDef) -> set[str]:
    """Attributes that a class declares or that its methods set on `self`."""
    annotated = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
    declared = {target.id for target in annotated if isinstance(target, ast.Name)}
    stored = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name) and each.value.id == "self"
    }  # fmt: skip
    return declared | stored


def parameters(node: ast.ClassDef) -> int:
    """Count the parameters of a class's own `__init__`, without `self`."""
    for each in node.body:
        if isinstance(each, _FUNCTIONS) and each.name == "__init__":
            given = each.args
            return len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
    return 0


def shared_names(found: list[Module]) -> dict[str, list[str]]:
    """Public names of classes and type aliases that more than one module defines."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in found:
        for name in sorted(set(_defined(module.tree))):
            places[name].append(module.name)
    return {name: where for name, where in places.items() if len(where) > 1}


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, _ALIAS_VALUES):
            for target in node.targets:
                if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z][A-Za-z]*[a-z][A-Za-z]*", target.id):
                    yield target.id


def imports(module: Module, known: set[str]) -> set[str]:
    """Return modules of the package that a module imports anywhere: lazily and for type checking, too."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                found.add(full if (full := f"{node.module}.{alias.name}") in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & known) - {module.name}


def cycles(found: list[Module]) -> list[list[str]]:
    """Return groups of modules that reach each other by imports (Tarjan's strongly connected components)."""
    known = {module.name for module in found}
    graph = {module.name: sorted(imports(module, known)) for module in found}
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    knots: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], order[other])
        if low[name] == order[name]:
            knot = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(knot) > 1:
                knots.append(sorted(knot))

    for name in graph:
        if name not in order:
            visit(name)
    return knots


def by_folder(found: list[Module]) -> Counter[str]:
    """Count the modules of each folder of the package."""
    return Counter(module.path.relative_to(PACKAGE).parts[0] for module in found)
