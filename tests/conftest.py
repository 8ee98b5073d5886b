"""Shared by all tests: long files first, cluster logs with a failure, and a list of tests that were not run.

CI does not accept tests that were not run.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from embarcadero.node.local import LocalCluster

LONG = (
    "docs/test_spark_page.py", "sim/test_plants.py", "sim/test_seeds.py", "spark/test_sink_kills.py",
    "system/test_cli.py", "spark/", "sim/", "system/", "docs/", "chaos/", "demo/", "tier/",
)  # fmt: skip
"""Files and folders of tests that take long, the longest first.

Files are given to processes in this order (see the Makefile), so that only short files remain at the end and all
processes end at about the same time. The two files that start Spark more than once are not adjacent: each takes both
cores.
"""
LOG_CHARACTERS = 4_000

collect_ignore = [] if "MATRIX_PYSPARK" in os.environ else ["matrix"]  # other environments, other jars: make matrix

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")  # a machine that stalls for a moment is no finding


def pytest_configure() -> None:
    """Make Ctrl-C effective, also for processes that tests start: a shell's `&` makes them ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files in the order of LONG; within a file, and among all others, the order stays."""
    items.sort(key=lambda item: _rank(item.path.as_posix()))


def _rank(path: str) -> int:
    return next((place for place, name in enumerate(LONG) if f"/tests/{name}" in path), len(LONG))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a test that failed, show the logs of clusters that still run."""
    report = yield
    if report.failed:
        clusters = [found for found in gc.get_objects() if isinstance(found, LocalCluster)]
        for path in (path for cluster in clusters for path in sorted(cluster.data_dir.glob("logs/*.log"))):
            report.sections.append((f"{item.name}: end of {path.name}", path.read_text()[-LOG_CHARACTERS:]))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that were not run."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.write_line(f"not run: {len(skipped)} tests: " + ", ".join(r.nodeid for r in skipped))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI, a test that was not run is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
