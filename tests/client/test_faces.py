"""One client, two interfaces: the client for threads is generated from the asyncio client."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import embarcadero as emb
from embarcadero_proof.faces import API, generated, unawaited

CLASSES = ("Log", "Publisher", "Subscriber")
ONLY_FOR_THREADS = {"ended", "run", "twin"}


def calls(name: str) -> list[tuple[str, Any, Any]]:
    """The public members of a class: name, for threads, for asyncio."""
    one, other = getattr(emb, name), getattr(emb.aio, name)
    names = {each for each in dir(one) if not each.startswith("_")} - ONLY_FOR_THREADS
    return [(each, getattr(one, each), getattr(other, each)) for each in sorted(names)]


def blocking(docstring: str) -> str:
    """A docstring of the asyncio client as it appears in the client for threads."""
    return "\n".join(unawaited(line) for line in docstring.split("\n"))


@pytest.mark.parametrize("name", sorted(generated()))
def test_the_committed_file_is_the_output_of_the_generator(name: str) -> None:
    """`make faces` changes nothing."""
    assert (API / f"{name}.py").read_text() == generated()[name]


@pytest.mark.parametrize("name", CLASSES)
def test_calls_have_the_same_arguments(name: str) -> None:
    """Names, kinds and defaults, also of the hand-written calls."""
    for each, one, other in calls(name):
        if callable(one):
            assert parameters(one) == parameters(other), each


def parameters(call: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """The parameters of a call."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(call).parameters.values()]


@pytest.mark.parametrize("name", CLASSES)
def test_calls_have_the_same_docstrings(name: str) -> None:
    """Without `await`; also those of the hand-written calls."""
    for each, one, other in calls(name):
        assert inspect.getdoc(one) == blocking(inspect.getdoc(other) or ""), each
        assert inspect.getdoc(one), each
    assert inspect.getdoc(getattr(emb, name)) == blocking(inspect.getdoc(getattr(emb.aio, name)) or "")
    assert inspect.getdoc(emb.connect) == blocking(inspect.getdoc(emb.aio.connect) or "")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("end = (await log.tail('orders')).seq", "end = log.tail('orders').seq"),
        ("async with emb.aio.connect() as log: ...", "with emb.connect() as log: ..."),
        ("at = await (await publisher.publish(rows(1)))", "at = publisher.publish(rows(1)).result()"),
        ("await future", "future.result()"),
        ("await log.cuts('t', (await log.tail('t')).index)", "log.cuts('t', log.tail('t').index)"),
    ],
)
def test_lines_without_await(line: str, expected: str) -> None:
    """Futures are asked for their result, everything else is called."""
    assert unawaited(line) == expected
