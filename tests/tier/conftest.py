"""One private cluster for all tests of the tier that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import embarcadero as emb
from embarcadero.client.api.sync_log import Log


@pytest.fixture(scope="package")
def log() -> Iterator[Log]:
    with emb.local(brokers=2, replicas=1) as log:
        yield log
