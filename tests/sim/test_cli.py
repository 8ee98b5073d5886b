"""The command line of the simulator refuses invalid input."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from embarcadero_proof.cli.main import app


@pytest.mark.parametrize("seeds", ["5", "5:5", "x:y"])
def test_an_invalid_span_of_seeds_is_refused(seeds: str) -> None:
    """The exit code is 2, with one line that shows the form of a span."""
    shown = CliRunner().invoke(app, ["sim", "--seeds", seeds])
    assert shown.exit_code == 2
    assert "FIRST:LAST" in shown.stderr
    assert "Traceback" not in shown.output
