"""Shared by all tests: tests that were not run are named and counted, and CI does not accept any."""

from __future__ import annotations

import os
import signal

import pytest


def pytest_configure() -> None:
    """Let Ctrl-C be heard, also by processes that tests start: a shell's `&` makes it unheard."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
