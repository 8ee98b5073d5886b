"""The page about Spark works: every sample runs and prints the expected output.

It starts Spark twice, so it is apart.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.samples import RUN, Runner, blocks
from tests.docs.test_samples import SPARK, catalog, cluster, runner, warm

__all__ = ["catalog", "cluster", "runner", "warm"]  # fixtures


@pytest.fixture
def page() -> Path:
    """The one page of this file."""
    return SPARK


@pytest.mark.timeout(600)
def test_samples_run_and_print_the_expected_output(runner: Runner, page: Path) -> None:
    """From top to bottom, as a reader would do it."""
    samples = blocks(page)
    runner.run(samples)

    assert runner.ran == sum(block.language in RUN for block in samples)
