"""PySpark 3.5 has no Python data sources: it is refused with the version to install."""

from __future__ import annotations

import os

import pyspark
import pytest

from embarcadero.errors import NotAvailable
from embarcadero.spark import session

SAYS = r"PySpark 3\.5\.\d is installed: it has no Python data sources; use 4\.0 or newer .*pip install"


def test_a_session_is_refused() -> None:
    """Before Java is looked for."""
    assert os.environ["MATRIX_PYSPARK"] == pyspark.__version__
    with pytest.raises(NotAvailable, match=SAYS):
        session()


def test_the_source_is_refused() -> None:
    """When it is imported, as the class can't even be defined."""
    with pytest.raises(NotAvailable, match=SAYS):
        import pyspark_embarcadero  # noqa: F401 - the import is what is tested
