"""Shared by tests of storage."""

from __future__ import annotations

import pytest

from tests.storage.copies import Copies


@pytest.fixture
def copies() -> Copies:
    """Two copies of the same records."""
    return Copies()
