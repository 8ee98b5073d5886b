"""Pages fit together: links lead somewhere, commands exist, everything public and every error is documented."""

from __future__ import annotations

import pickle
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import embarcadero as emb
from embarcadero import errors
from embarcadero.cli.main import app
from embarcadero.config.table import KEYS, SECTIONS, SEEDS
from tests.docs.samples import PAGES, ROOT, blocks, indented

DOCS = ROOT / "docs"
LINKED = [
    *PAGES, *sorted((DOCS / "reports").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md",
    ROOT / "examples" / "README.md",
]  # fmt: skip
WAY = [
    "README", "install", "quick-start", "concepts", "publish", "read", "examples", "spark", "pipeline", "tables",
    "lakehouse", "operations", "operations-systemd", "durability", "security", "guarantees",
]  # fmt: skip
"""The guides, in reading order. The other pages are reference."""


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", LINKED, ids=_name)
def test_links_lead_to_existing_targets(page: Path) -> None:
    """Files exist, headings too."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in (link for link in links if not link.startswith(("http://", "https://"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def test_the_index_has_every_page_and_each_leads_to_the_next() -> None:
    """The index lists all pages, and the last line of a guide links to the next guide."""
    index = (DOCS / "README.md").read_text()

    assert [page.name for page in DOCS.glob("*.md") if page.stem != "README" and f"({page.name})" not in index] == []
    for page, following in pairwise(WAY):
        last = (DOCS / f"{page}.md").read_text().splitlines()[-1]
        assert last.startswith("Next: ["), page
        assert f"]({following}.md)" in last, page
    assert "docs/README.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_commands_that_are_shown_and_not_run_exist(page: Path) -> None:
    """They take minutes or need an administrator, so only verbs, options and targets are checked."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in indented(page):
        program, *arguments = shlex.split(line, comments=True) or [""]
        if program == "make":
            assert {word for word in arguments if "=" not in word} <= targets, line
        elif program == "embarcadero":
            _parse(arguments)


def _parse(arguments: list[str]) -> None:
    """Parse a command line as the program would, and go no further."""
    command: Any = get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[arguments.pop(0)]
    if ">" in arguments:
        arguments = arguments[: arguments.index(">")]
    command.make_context(command.name, arguments)


def test_every_verb_is_on_the_page_of_the_command_line() -> None:
    """With an example."""
    text = (DOCS / "command-line.md").read_text()

    assert [verb for verb in _verbs(get_command(app), "embarcadero") if verb not in text] == []


def _verbs(command: Any, name: str) -> Iterator[str]:
    for verb, inner in getattr(command, "commands", {}).items():
        yield from _verbs(inner, f"{name} {verb}")
    if not hasattr(command, "commands"):
        yield name


def _public() -> Iterator[str]:
    yield from (name for name in emb.__all__ if not name.startswith("__"))
    for kind in (emb.Log, emb.Publisher, emb.Subscriber, emb.Batch, emb.Record, emb.RecordFuture):
        yield from (name for name in dir(kind) if not name.startswith("_") and name not in INNER)


INNER = {"twin", "brokers", "forget", "pump", "of_entry", "of_gap", "payload"}
"""Names without an underscore that are for other modules of the package."""


CLIENT = ("publish", "read", "python")
"""The pages about the Python client."""


def test_everything_public_is_on_the_pages_about_the_client() -> None:
    """Names of the package, methods and attributes of its objects."""
    words = set(re.findall(r"\w+", "".join((DOCS / f"{page}.md").read_text() for page in CLIENT)))

    assert sorted(set(_public()) - words) == []


@pytest.mark.parametrize("page", LINKED, ids=_name)
def test_keys_on_pages_are_keys_of_the_configuration(page: Path) -> None:
    """`section.key` in backticks is a key, unless it is a file, a name of the Python client, or an old name."""
    found = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z0-9_]+)(?:[=:][^`]*)?`", page.read_text())
    known = {*KEYS, *SEEDS, "cluster.json", "limits.py", "topic.lanes", "log.cluster"}
    known |= {f"log.{name}" for name in dir(emb.Log)}
    assert [key for key in found if key not in known] == []


def _bases(kind: type) -> Iterator[tuple[str, str]]:
    """Every error class of the package below this one, with its base class."""
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield child.__name__, kind.__name__
            yield from _bases(child)


def test_every_error_has_its_anchor_on_the_page_of_errors() -> None:
    """The anchor is the name of the class in lower case: messages can link to it."""
    headings = re.findall(r"^### (\w+)$", (DOCS / "errors.md").read_text(), re.MULTILINE)

    assert sorted(headings) == sorted({"EmbarcaderoError", *dict(_bases(errors.EmbarcaderoError))})


@pytest.mark.parametrize("name", sorted({"EmbarcaderoError", *dict(_bases(errors.EmbarcaderoError))}))
def test_a_printed_error_ends_with_its_anchor(name: str) -> None:
    """`str(error)` is message, hint and the section of the page; also after pickling, and in another process."""
    kind = getattr(errors, name)
    error = kind("m", [errors.Closed("x", "y")]) if kind is errors.ManyErrors else kind("m", "h")
    copy = pickle.loads(pickle.dumps(error))

    assert str(error).endswith(f" [docs/errors.md#{name.lower()}]")
    assert (str(copy), copy.hint) == (str(error), error.hint)
    assert kind is errors.ManyErrors or str(error).startswith("m (h) [")


def test_the_error_tree_on_the_page_is_the_tree_of_the_code() -> None:
    """Each class stands below its base class."""
    tree = next(block.text for block in blocks(DOCS / "errors.md") if block.text.startswith("EmbarcaderoError"))
    above: list[str] = []
    found = {}
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip("│├└─ "))) // 4
        above[depth:] = [line.split()[-1]]
        found[above[-1]] = above[-2] if depth else ""

    assert found == {"EmbarcaderoError": "", **dict(_bases(errors.EmbarcaderoError))}
