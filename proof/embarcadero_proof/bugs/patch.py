"""Patch functions of the running product: an injected bug replaces text of one function.

    with patched([Edit("embarcadero.sequencer.order.batches:Order.place", "if seen.any():", "if False:")]):
        ...

A patch reads the source of the module, replaces the text, compiles the module, and exchanges the code of that one
function (`function.__code__`). So every reference to it, however it was imported, runs the patched code. Afterwards the
function gets its own code back. A patch whose text is not in the source exactly once raises SourceMoved: the source has
changed, and the patch must follow it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Final

from embarcadero.errors import EmbarcaderoError

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_WRAPPED: Final = ("fget", "__func__", "func", "__wrapped__")
_NAME_IT: Final = "let the injected bug name the function that it changes"


class SourceMoved(EmbarcaderoError):
    """A patch does not fit the source any more."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace text in one function. `where` is `module:qualified name`; a property or a decorated function works, too.

    `old` must occur exactly once in the source of the function, without its decorators. `new` may use everything that
    is visible in the function: its arguments, globals of its module, its own imports.
    """

    where: str
    old: str
    new: str

    @property
    def module(self) -> str:
        """The module's name."""
        return self.where.partition(":")[0]

    @property
    def name(self) -> str:
        """The function's qualified name."""
        return self.where.partition(":")[2]


@contextmanager
def patched(edits: Sequence[Edit]) -> Iterator[None]:
    """Apply all edits while the block runs. Edits of one function are applied one after the other."""
    by_function: dict[str, list[Edit]] = defaultdict(list)
    for edit in edits:
        by_function[edit.where].append(edit)
    exchanges = [(function_of(own[0]), patched_code(own)) for own in by_function.values()]
    with ExitStack() as stack:
        for function, code in exchanges:
            stack.callback(setattr, function, "__code__", function.__code__)
            function.__code__ = code
        yield


def function_of(edit: Edit) -> FunctionType:
    """Find the function object of an edit. Raises SourceMoved if there is none."""
    found: Any = importlib.import_module(edit.module)
    try:
        for part in edit.name.split("."):
            found = inspect.getattr_static(found, part)
    except AttributeError:
        raise SourceMoved(f"there is no function {edit.where}", _NAME_IT) from None
    while not isinstance(found, FunctionType):
        inner = [getattr(found, name) for name in _WRAPPED if hasattr(found, name)]
        if not inner:
            raise SourceMoved(f"{edit.where} is not a function", _NAME_IT)
        found = inner[0]
    function: FunctionType = inspect.unwrap(found)
    return function


def patched_code(edits: Sequence[Edit]) -> CodeType:
    """Compile the function of these edits with their texts replaced. Raises SourceMoved if an edit does not fit."""
    module, name = edits[0].module, edits[0].name
    file, text = _source(module)
    start, end = _lines(module, name)
    lines = text.splitlines(keepends=True)
    body = "".join(lines[start - 1 : end])
    for edit in edits:
        if (times := body.count(edit.old)) != 1:
            raise SourceMoved(
                f"{edit.where} has {edit.old!r} {times} times instead of once", "adapt the injected bug to the source"
            )
        body = body.replace(edit.old, edit.new)
    changed = "".join(lines[: start - 1]) + body + "".join(lines[end:])
    code = _code_named(compile(changed, file, "exec", dont_inherit=True), name)
    function = function_of(edits[0])
    if code is None or code.co_freevars != function.__code__.co_freevars:
        raise SourceMoved(f"{edits[0].where} closes over other variables than before", "patch another function")
    return code


@functools.cache
def _source(module: str) -> tuple[str, str]:
    file = inspect.getsourcefile(importlib.import_module(module))
    if file is None:
        raise SourceMoved(f"{module} has no source", "patch a module that is written in Python")
    with open(file, encoding="utf-8") as source:
        return file, source.read()


@functools.cache
def _lines(module: str, name: str) -> tuple[int, int]:
    """First and last line of a function, without its decorators."""
    node: Any = ast.parse(_source(module)[1])
    for part in name.split("."):
        found = [each for each in ast.walk(node) if isinstance(each, (*_FUNCTIONS, ast.ClassDef)) and each.name == part]
        if not found:
            raise SourceMoved(f"there is no function {module}:{name}", _NAME_IT)
        node = found[-1]  # of several with one name the last one counts, as at run time
    return node.lineno, node.end_lineno


def _code_named(code: CodeType, name: str) -> CodeType | None:
    """Find the code of a function by its qualified name; the last one of several."""
    found = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found = constant if constant.co_qualname == name else _code_named(constant, name) or found
    return found
