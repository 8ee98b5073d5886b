"""Open files: the limit is raised as far as roles need it and the system allows it."""

from __future__ import annotations

import resource
from unittest.mock import patch

import pytest

from embarcadero.limits import FILES_PER_REPLICA, FILES_SPARE
from embarcadero.node.process import connections_for


@pytest.mark.parametrize(
    ("brokers", "replicas", "soft", "hard", "raised", "connections"),
    [
        (1, 0, 1_024, 1 << 20, 1_000 + FILES_SPARE, 1_000),
        (0, 1, 1_024, 1 << 20, FILES_PER_REPLICA + FILES_SPARE, 1_000),
        (2, 3, 1_024, 1 << 20, 2_000 + 3 * FILES_PER_REPLICA + FILES_SPARE, 1_000),
        (0, 1, 1_024, resource.RLIM_INFINITY, FILES_PER_REPLICA + FILES_SPARE, 1_000),
        (2, 1, 1_024, 2_048, 2_048, (2_048 - FILES_SPARE) // 2),
        (1, 1, 1 << 19, 1 << 20, None, 1_000),
        (1, 1, resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 1_000),
    ],
)  # fmt: skip
def test_the_limit_of_open_files_is_raised_for_brokers_and_replicas(
    brokers: int, replicas: int, soft: int, hard: int, raised: int | None, connections: int
) -> None:
    """As far as allowed, and never lowered; brokers accept no more connections than that."""
    with patch.object(resource, "getrlimit", return_value=(soft, hard)), patch.object(resource, "setrlimit") as set_to:
        assert connections_for(brokers, 1_000, replicas) == connections
    assert [call.args[1] for call in set_to.call_args_list] == ([] if raised is None else [(raised, hard)])
