"""Every sample of README and the page about Spark runs. Both start Spark, so they have a file of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.samples import RUN, Runner, blocks
from tests.docs.test_samples import README, SPARK, catalog, cluster, runner, warm

__all__ = ["catalog", "cluster", "runner", "warm"]  # fixtures


@pytest.fixture(params=[README, SPARK], ids=lambda page: page.name)
def page(request: pytest.FixtureRequest) -> Path:
    """The pages of this file."""
    found: Path = request.param
    return found


@pytest.mark.timeout(600)
def test_samples_run_and_print_the_expected_output(runner: Runner, page: Path) -> None:
    """From top to bottom, as a reader follows the page."""
    samples = blocks(page)
    runner.run(samples)

    assert runner.ran == sum(block.language in RUN for block in samples)
