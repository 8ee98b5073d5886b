"""Measure how plain the text is: constructions that readers stumble over, per 1,000 words of prose.

`embarcadero-proof prose` prints the measure for each folder; tests/test_prose.py keeps it from rising. Prose is
Markdown without its code. In Python files it is docstrings, comments, string literals with spaces, and names of tests.

The same measure finds 0.1 to 2 per 1,000 words in h11, httpx, structlog, aiokafka and pyiceberg (November 2026).
"""

from __future__ import annotations

import ast
import io
import math
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_VERBS: Final = (
    "is|was|are|were|has|had|does|did|comes?|came|goes|went|gets|got|reads|writes|waits|asks|asked|needs|wants|dies|died"
    "|leads|holds|knows|stays|remains|follows|lies|left|made|makes|sent|sends|won"
)
CONSTRUCTIONS: Final = {
    "actor without a name": r"whom?ever|(?:no|some|any|every)body|those who|all who|the ones? (?:who|that)",
    "who + verb": rf"who (?:{_VERBS})",
    "what + verb": rf"what (?:{_VERBS}|it|they|we|one)",
    "preposition + what": r"(?:of|from|to|by|with|for|below|above|beside|after|before|behind|than) what",
    "one that": r"ones? (?:that|who|which)|that which|all that",
    "old word": r"anew|in vain|lest|whence|thereof|therein|wherein|for ever|but for|in place of|for good",
    "told": r"tells?|told|telling|said|says",
    "person": r"(?:its|the|whose) heart|reign(?:s|ed|ing)?|buri(?:al|ed|es)|nursery|desk|wished|looks? after|hears? of",
    "is to be": r"(?:is|are|was|were) to be",
}  # fmt: skip
"""Constructions that style.md asks to avoid, by name."""

_PATTERN: Final = re.compile(
    "|".join(f"(?P<c{number}>\\b(?:{each})\\b)" for number, each in enumerate(CONSTRUCTIONS.values())), re.IGNORECASE
)
_NAMES: Final = tuple(CONSTRUCTIONS)
_WORD: Final = re.compile(r"[A-Za-z][A-Za-z'’-]*")
_CODE: Final = re.compile(r"``[^`]*``|`[^`]*`")
_FENCE: Final = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_INDENTED: Final = re.compile(r"^(?: {4}|\t).*$", re.MULTILINE)
_COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK: Final = re.compile(r"\]\([^)]*\)")
_SENTENCE: Final = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\s\|\s|\n\s*[-*#|]")
_TECHNICAL: Final = re.compile(r"noqa|type:|fmt:|pragma")


@dataclass(slots=True)
class Prose:
    """The measure of a text."""

    words: int = 0
    found: Counter[str] = field(default_factory=Counter)
    sentences: list[int] = field(default_factory=list)  # words in each

    @property
    def per_thousand(self) -> float:
        """Constructions per 1,000 words."""
        return 1000 * self.found.total() / self.words if self.words else 0.0

    @property
    def median(self) -> float:
        """Words in a median sentence."""
        return statistics.median(self.sentences) if self.sentences else 0.0

    def add(self, text: str) -> None:
        """Count a piece of prose."""
        text = _CODE.sub("x", text)
        self.words += len(_WORD.findall(text))
        self.found.update(name for name, _ in matches(text))
        counts = (len(_WORD.findall(sentence)) for sentence in _SENTENCE.split(text))
        self.sentences += [count for count in counts if count > 1]


def matches(text: str) -> Iterator[tuple[str, re.Match[str]]]:
    """Yield constructions in a text; questions may use who and what."""
    for match in _PATTERN.finditer(text):
        name = _NAMES[int((match.lastgroup or "c0")[1:])]
        end = re.search(r"[.!?\n|]", text[match.end() :])
        if end is None or end.group() != "?":
            yield name, match


def markdown(text: str) -> str:
    """Return the prose of a page: no code, no addresses."""
    for pattern, new in ((_COMMENT, ""), (_FENCE, ""), (_INDENTED, ""), (_LINK, "]")):
        text = pattern.sub(new, text)
    return text


def python(text: str) -> list[str]:
    """Return docstrings, comments, messages and names of tests of a module."""
    tree = ast.parse(text)
    functions = [node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    pieces = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    pieces = [piece for piece in pieces if " " in piece.strip()]
    pieces += [name.removeprefix("test_").replace("_", " ") for name in functions if name.startswith("test_")]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not _TECHNICAL.search(token.string):
            pieces.append(token.string.lstrip("#:! "))
    return pieces


def measure(paths: Iterable[Path]) -> Prose:
    """Measure files: .py and .md."""
    prose = Prose()
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for piece in [markdown(text)] if path.suffix == ".md" else python(text):
            prose.add(piece)
    return prose


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield constructions in a file: line, name, words. In a Python file this searches code, too."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        for name, match in matches(line.replace("_", " ") if "def test_" in line else _CODE.sub("x", line)):
            yield number, name, match.group()


def folders(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Group files by folder: packages of the product and of the proof, folders of tests, all of docs, the root."""
    grouped: dict[str, list[Path]] = {}
    for path in files:
        parts = path.relative_to(root).parts
        depth = {"src": 3, "proof": 3, "tests": 2}.get(parts[0], 1)
        name = "/".join(parts[:-1][:depth]) or "."
        grouped.setdefault(name, []).append(path)
    return dict(sorted(grouped.items()))


def repository() -> Path:
    """Return the folder of the checkout that contains this package."""
    return Path(__file__).parent.parent.parent


def texts(root: Path | None = None) -> list[Path]:
    """Return files of the repository with prose. Reports of runs are records, and left out."""
    root = root or repository()
    found = [path for top in ("src", "proof", "tests", "docs", "examples") for path in (root / top).rglob("*")]
    found = [*root.glob("*.md"), *(path for path in found if path.suffix in {".py", ".md"})]
    left_out = {root / "docs" / "reports", root / "tests" / "test_prose.py", Path(__file__)}
    return sorted(path for path in found if not left_out & {path, *path.parents} and ".egg-info" not in str(path))


LIMITS: Final = "tests/prose.tsv"


def limits(root: Path | None = None) -> dict[str, float]:
    """Return the highest allowed measure of each folder."""
    lines = ((root or repository()) / LIMITS).read_text().splitlines()
    return {name: float(limit) for name, limit in (line.split("\t") for line in lines)}


def lower(root: Path | None = None) -> None:
    """Write today's measures as limits where they are lower than before."""
    root = root or repository()
    old = limits(root) if (root / LIMITS).exists() else {}
    new = {name: math.ceil(10 * prose.per_thousand) / 10 for name, prose in by_folder(root).items()}
    lines = (f"{name}\t{min(limit, old.get(name, limit))}\n" for name, limit in new.items())
    (root / LIMITS).write_text("".join(lines))


def by_folder(root: Path | None = None) -> dict[str, Prose]:
    """Return the measure of each folder of the repository."""
    root = root or repository()
    return {name: measure(paths) for name, paths in folders(root, texts(root)).items()}
