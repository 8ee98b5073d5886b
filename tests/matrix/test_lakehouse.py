"""The page about Iceberg and Delta can be followed, with the version that it recommends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.samples import RUN, Runner, blocks
from tests.docs.test_samples import LAKEHOUSE, cluster, runner, warm

__all__ = ["cluster", "runner", "warm"]  # fixtures


@pytest.fixture
def page() -> Path:
    """The one page of this file."""
    return LAKEHOUSE


def test_samples_run_and_print_the_expected_output(runner: Runner, page: Path) -> None:
    """From top to bottom, as a reader would do it."""
    samples = blocks(page)
    runner.run(samples)

    assert runner.ran == sum(block.language in RUN for block in samples)
