"""Generate the client for threads from the asyncio one: `make faces` writes it.

Each public call of the classes Log, Publisher and Subscriber becomes a blocking call with the same name, signature and
docstring. If the base class in `client/api/threads.py` has the call under its own name, nothing is generated. If the
base class has it under that name with an underscore, the generated call uses it. Otherwise the background thread runs
the asyncio call. A test checks that the committed text is the generated one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import embarcadero

API: Final = Path(embarcadero.__file__).parent / "client" / "api"
WIDTH: Final = 120

_IMPORTS: Final = {
    "sync_log": '''\
"""The synchronous client: Log, Publisher and Subscriber. `make faces` generates it.

The sources are `aio_log`, `aio_calls` and `aio_streams`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import pyarrow as pa

from embarcadero.client.api.aio_calls import HeldName, LanePositions, Survey
from embarcadero.client.api.aio_log import open_log
from embarcadero.client.api.threads import ThreadedLog, ThreadedPublisher, ThreadedSubscriber, opened
from embarcadero.client.arguments import (
    AS_CONFIGURED,
    Moment,
    PublisherArguments,
    StartPosition,
    Timeout,
    TopicChanges,
)
from embarcadero.client.brokers import BatchLimits
from embarcadero.client.results import Batch, RecordFuture, TopicInfo
from embarcadero.config import Config
from embarcadero.config.key import Duration
from embarcadero.limits import CLOSE_TIMEOUT_S
from embarcadero.types import Cut, Position, ReaderProgress, StagedBatch, Tail, Tier, Topic
''',
}
_BODIES: Final = {
    "connect": "return Log(*opened(open_log(addresses, config, timeout)))",
    "publisher": "return self._open_publisher(Publisher, topic, options, timeout)",
    "subscribe": "return self._open_subscriber(Subscriber, topic, start, read, partitions, group, timeout)",
}
"""Bodies of calls that create objects of the generated module."""
_WORDS: Final = (
    (r"Opening\[(\w+)\]", r"\1"),
    (r"RecordAwaitable", "RecordFuture"),
    (r"AsyncIterator\[", "Iterator["),
    (r"self: _Asks", "self"),
    (r"async def", "def"),
    (r"  # noqa.*", ""),
)
_PHRASES: Final = (
    ("async with", "with"),
    ("async for", "for"),
    ("emb.aio.", "emb."),
    ("Publishes records into one topic.", "Publishes records into one topic; thread-safe."),
    ("share one connection", "share one thread and one connection"),
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """A module of the client: its lines, and its syntax tree."""

    lines: list[str]
    tree: ast.Module

    @classmethod
    def of(cls, name: str) -> Source:
        """Read a module of `client/api`."""
        text = (API / f"{name}.py").read_text()
        return cls(text.splitlines(), ast.parse(text))

    def cls(self, name: str) -> ast.ClassDef:
        """Return a class of the module."""
        return next(node for node in self.tree.body if isinstance(node, ast.ClassDef) and node.name == name)

    def docstring(self, node: Function | ast.ClassDef) -> list[str]:
        """Return the lines of a docstring for the client for threads."""
        first = node.body[0]
        return [unawaited(line) for line in self.lines[first.lineno - 1 : first.end_lineno]]

    def header(self, node: Function) -> list[str]:
        """Return decorators and signature for the client for threads."""
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        text = "\n".join(self.lines[start - 1 : node.body[0].lineno - 1])
        for pattern, word in _WORDS:
            text = re.sub(pattern, word, text)
        return text.split("\n")


def unawaited(line: str) -> str:
    """Remove `await` from a line of a docstring: futures become calls of `result()`, other awaits become plain calls.

        unawaited("position = await (await publisher.send(b'1'))")      # position = publisher.send(b'1').result()
    """
    for old, new in _PHRASES:
        line = line.replace(old, new)
    line = re.sub(r"\bawait future\b", "future.result()", line)
    while (start := line.rfind("(await ")) >= 0:
        end = _closing(line, start)
        inner = line[start + len("(await ") : end]
        if line[:start].endswith("await "):
            line = f"{line[: start - len('await ')]}{inner}.result(){line[end + 1 :]}"
        else:
            line = f"{line[:start]}{inner}{line[end + 1 :]}"
    return line.replace("await ", "")


def _closing(line: str, start: int) -> int:
    """Return the end of the parenthesis that begins at `start`."""
    depth = 0
    for at in range(start, len(line)):
        depth += (line[at] == "(") - (line[at] == ")")
        if not depth:
            return at
    return len(line)


def _public(node: ast.ClassDef) -> Iterator[Function]:
    for each in node.body:
        if isinstance(each, Function) and not each.name.startswith("_"):
            yield each


def _arguments(node: Function) -> list[str]:
    """Return the arguments of a call, as they are passed on."""
    asked = node.args
    found = [each.arg for each in asked.args if each.arg != "self"]
    found += [f"{each.arg}={each.arg}" for each in asked.kwonlyargs]
    return found + ([f"**{asked.kwarg.arg}"] if asked.kwarg is not None else [])


def _call(function: str, arguments: list[str], before: str, after: str) -> list[str]:
    """Format a call in one line if it fits, else with its arguments in lines of their own."""
    whole = f"        {before}{function}({', '.join(arguments)}){after}"
    if len(whole) <= WIDTH:
        return [whole]
    inner = f"            {function}({', '.join(arguments)})"
    if after and len(inner) <= WIDTH:
        return [f"        {before}", inner, f"        {after}"]
    indent = "                " if after else "            "
    lines = [indent + ", ".join(arguments) + ","]
    while len(lines[-1]) > WIDTH:
        cut = lines[-1].rfind(", ", 0, WIDTH - 1) + 1
        lines[-1:] = [lines[-1][:cut], indent + lines[-1][cut:].lstrip()]
    if after:
        return [f"        {before}", f"            {function}(", *lines, "            )", f"        {after}"]
    return [f"        {before}{function}(", *lines, "        )"]


def _body(node: Function, by_hand: set[str], in_log: bool) -> list[str]:
    """Return the body of a generated call."""
    if node.name in _BODIES:
        return [f"        {_BODIES[node.name]}"]
    gives = isinstance(node.returns, ast.Constant) and node.returns.value is None
    back = "" if gives else "return "
    if node.decorator_list:
        return [f"        return self.{'_log.' if in_log else '_'}{node.name}"]
    if f"_{node.name}" in by_hand or not in_log:
        return _call(f"self._{node.name}", _arguments(node), back, "")
    if isinstance(node, ast.AsyncFunctionDef):
        return _call(f"self._log.{node.name}", _arguments(node), f"{back}self.thread.wait(", ")")
    return _call(f"self._log.{node.name}", _arguments(node), back, "")


def _class(name: str, base: str, sources: list[tuple[Source, str]]) -> list[str]:
    """Generate one class of the client for threads. The first source has its docstring."""
    threads = Source.of("threads").cls(base)
    by_hand = {node.name for node in threads.body if isinstance(node, Function)}
    source, kind = sources[0]
    lines = [f"class {name}({base}):", *source.docstring(source.cls(kind))]
    for source, kind in sources:
        for node in _public(source.cls(kind)):
            if node.name not in by_hand:
                body = _body(node, by_hand, base == "ThreadedLog")
                lines += ["", *source.header(node), *source.docstring(node), *body]
    return lines


@cache
def generated() -> dict[str, str]:
    """Return the generated modules: name -> text."""
    log, calls, streams = Source.of("aio_log"), Source.of("aio_calls"), Source.of("aio_streams")
    connect = next(node for node in log.tree.body if isinstance(node, ast.FunctionDef) and node.name == "connect")
    made = {
        "sync_log": [
            *log.header(connect), *log.docstring(connect), *(line[4:] for line in _body(connect, set(), True)), "", "",
            *_class("Log", "ThreadedLog", [
                (log, "Log"), (calls, "SurveyCalls"), (calls, "TierCalls"), (calls, "SessionCalls"),
                (calls, "ReaderCalls"),
            ]), "", "",
            *_class("Publisher", "ThreadedPublisher", [(streams, "Publisher")]), "", "",
            *_class("Subscriber", "ThreadedSubscriber", [(streams, "Subscriber")]),
        ],
    }  # fmt: skip
    return {name: _IMPORTS[name] + "\n\n" + "\n".join(lines) + "\n" for name, lines in made.items()}


def main() -> None:
    """Write the client for threads."""
    for name, text in generated().items():
        (API / f"{name}.py").write_text(text)


if __name__ == "__main__":
    main()
