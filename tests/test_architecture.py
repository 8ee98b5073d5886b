"""ARCHITECTURE.md is true: its files and functions exist, its layers are those that the tidy test checks."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_tidy import LAYERS

ROOT = Path(__file__).parent.parent
PRODUCT = ROOT / "src" / "embarcadero"
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
LINES_MAX, COLUMNS_MAX = 300, 100
FILES = sorted(set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", TEXT)))
FOLDERS = sorted(set(re.findall(r"`((?:[a-z_]+/)+)`", TEXT)))
PLACES = re.findall(r"\| `([a-z_/]+\.py)` \| `([A-Za-z_.]+)` \|", TEXT)


def functions(path: Path) -> set[str]:
    """Qualified names of the functions of a module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
    return found


def test_the_page_is_short() -> None:
    """A newcomer reads it in one session. Rows of tables may be wider than text."""
    lines = TEXT.splitlines()
    assert len(lines) <= LINES_MAX
    assert len(TEXT) <= LINES_MAX * COLUMNS_MAX
    assert [line for line in lines if len(line) > COLUMNS_MAX and not line.startswith("|")] == []


@pytest.mark.parametrize("name", FILES)
def test_every_named_file_exists(name: str) -> None:
    """In the product, or from the root of the repository."""
    assert (PRODUCT / name).is_file() or (ROOT / name).is_file()


@pytest.mark.parametrize("name", FOLDERS)
def test_every_named_folder_exists(name: str) -> None:
    """In the product, in a folder of it, or at the root of the repository."""
    assert (ROOT / name).is_dir() or (PRODUCT / name).is_dir() or [*PRODUCT.glob(f"*/{name}")]


@pytest.mark.parametrize(("file", "function"), PLACES)
def test_every_named_function_exists(file: str, function: str) -> None:
    """The table of places names functions of these files."""
    assert function in functions(PRODUCT / file)


def test_the_table_of_places_is_there() -> None:
    """It answers where a batch gets its position, where an ack leaves, where a copy is cut, where Spark reads."""
    assert len(PLACES) >= 6


def test_the_picture_of_the_layers_is_what_the_tidy_test_checks() -> None:
    """A line for each layer, its parts in alphabetical order."""
    picture = TEXT.partition("<!-- layers")[2].partition("```\n")[2].partition("```")[0]
    shown = [set(line.split()) for line in picture.splitlines() if line.strip()]
    assert shown == LAYERS


def test_every_folder_of_the_product_is_described() -> None:
    """The table of folders leaves none out."""
    folders = {path.name for path in PRODUCT.iterdir() if path.is_dir() and (path / "__init__.py").is_file()}
    assert {name for name in folders if f"`{name}/`" not in TEXT} == set()


READMES = sorted(path for folder in ("src", "proof") for path in (ROOT / folder).rglob("README.md"))


@pytest.mark.parametrize("page", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_a_folder_describes_exist(page: Path) -> None:
    """In its folder, in one of its folders, in the product, in the proof, or among the tests."""
    named = set(re.findall(r"`([a-z_/]+\.py)`", page.read_text()))
    roots = [ROOT, PRODUCT, PRODUCT.parent, ROOT / "proof" / "embarcadero_proof", page.parent]
    roots += [path for path in page.parent.iterdir() if path.is_dir()]
    roots += [path for path in (ROOT / "tests").iterdir() if path.is_dir()]
    assert {name for name in named if not any((root / name).is_file() for root in roots)} == set()
