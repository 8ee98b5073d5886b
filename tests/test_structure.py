"""The structure of the product may get simpler, not more tangled: limits that may only fall."""

from __future__ import annotations

from pathlib import Path

import pytest

from embarcadero_proof.structure import Measures, measures

MODULES_MAX = 180
SKIPS_MAX = 48
SHARED_NAMES_MAX = 3
WIDE_CLASSES_MAX = 0
LONG_CONSTRUCTORS_MAX = 0
CYCLIC_MODULES_MAX = 0
INJECTED_MAX = 0


@pytest.fixture(scope="module")
def found() -> Measures:
    """The product as it is."""
    return measures()


def test_the_product_has_few_modules(found: Measures) -> None:
    """A record's way through the product should be short."""
    assert found.modules <= MODULES_MAX


def test_production_code_knows_no_faults(found: Measures) -> None:
    """Faults and injected bugs come from the proof."""
    assert found.faults == 0
    assert found.injected <= INJECTED_MAX


def test_one_name_means_one_thing(found: Measures) -> None:
    """Classes and type aliases of different modules have different names."""
    assert len(found.shared_names) <= SHARED_NAMES_MAX


def test_classes_have_few_parts(found: Measures) -> None:
    """A class with many attributes, or a constructor with many parameters, is two things in one."""
    assert len(found.wide_classes) <= WIDE_CLASSES_MAX
    assert len(found.long_constructors) <= LONG_CONSTRUCTORS_MAX


def test_modules_do_not_import_each_other_in_circles(found: Measures) -> None:
    """Lazy imports and imports for type checking count."""
    assert sum(map(len, found.cycles)) <= CYCLIC_MODULES_MAX


def test_the_formatter_lays_out_all_but_tables(found: Measures) -> None:
    """`# fmt: skip` is for tables."""
    assert found.skips <= SKIPS_MAX


def test_the_measures_detect_violations(tmp_path: Path) -> None:
    """A small package with one of each: a cycle through a lazy import, a name used twice, wide classes."""
    package = tmp_path / "small"
    package.mkdir()
    names = ", ".join(f"a{number}" for number in range(30))
    stores = "\n".join(f"        self.a{number} = a{number}" for number in range(30))
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("def f():\n    from small.two import Place\n    return Place\n\nclass Place: ...\n")
    (package / "two.py").write_text(
        "from small import one\nclass Place: ...  # fmt: skip\n"
        f"class Wide:\n    def __init__(self, {names}):\n{stores}\n"
        "if planted('x'): print('EMBARCADERO_STEP')\n"
    )
    seen = measures(package)

    assert seen.modules == 3
    assert seen.cycles == [["small.one", "small.two"]]
    assert seen.shared_names == {"Place": ["small.one", "small.two"]}
    assert seen.wide_classes == {"Wide": 30}
    assert seen.long_constructors == {"Wide": 30}
    assert (seen.injected, seen.faults, seen.skips) == (1, 1, 1)
