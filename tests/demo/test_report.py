"""The demo's report, opened in a real browser: it is complete, its charts are drawn, and nothing is fetched."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

from embarcadero.demo.shop import (
    CITIES,
    SALES,
    RunFacts,
    Sample,
    ShopCheck,
    SqlAnswer,
    page,
    window_start,
    write_report,
)


def _facts() -> RunFacts:
    samples = [Sample(second, second * 1000, second * 900, second * 700, second * 300) for second in range(30)]
    sales = [
        {"window_start": window_start(number), "city": city, "orders": 3, "amount_cents": 100 * number}
        for number in range(20)
        for city in CITIES
    ]
    return RunFacts(
        samples=samples, story=[(0.1, "the cluster is up"), (12.0, "broker 1 <killed>")], kills=[(12.0, "broker 1")],
        cards={"records": "1,000,000", "seconds": "61"}, checks=[ShopCheck("every window once", True, "160 of 160")],
        answers=[SqlAnswer("Best customers", "select 1 < 2", pa.table({"customer": [7], "cents": [123456]}))],
        sales=pa.Table.from_pylist(sales, schema=SALES), seconds=61,
    )  # fmt: skip


def test_a_page_contains_everything_and_escapes_it() -> None:
    """Story, figures, checks, answers and two charts are in it; text can't become markup."""
    text = page(_facts())
    assert text.count("<svg") == 2
    for part in ("All promises held", "1,000,000", "broker 1 &lt;killed&gt;", "select 1 &lt; 2", "123,456", "Lisbon"):
        assert part in text
    assert not re.search(r"(src|href)='?\"?https?:", text)


def test_a_broken_promise_is_shown_first() -> None:
    """A failed check, and a run without any check, are no success."""
    facts = _facts()
    facts.checks.append(ShopCheck("nothing twice", False, "window 3 twice"))
    assert "A promise did not hold" in page(facts)
    assert not RunFacts().holds


@pytest.mark.system
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium: make system")
def test_a_browser_renders_it(tmp_path: Path) -> None:
    """Headless Chromium renders the page: the browser's document holds the table, and a screenshot is saved."""
    path = write_report(_facts(), tmp_path / "report.html")
    chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    seen = subprocess.run(
        [*chromium, "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert "every window once" in seen
    shot = tmp_path / "page.png"
    subprocess.run(
        [*chromium, f"--screenshot={shot}", "--window-size=1200,2000", path.as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert shot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert shot.stat().st_size > 20_000
