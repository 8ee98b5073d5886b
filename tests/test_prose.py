"""The text gets plainer, never less plain; commit subjects are short, imperative, and name their area."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from embarcadero_proof.prose import LIMITS, Prose, by_folder, limits, markdown, python

ROOT = Path(__file__).parent.parent
NEW_FOLDER_MAX = 3.0
CHECKED_FROM = "0cb50d7"  # subjects of later commits are checked
SUBJECT = re.compile(r"[a-z][\w ,./-]*: \S.*")
PAST_OR_THIRD = re.compile(r": (\w+(ed|ing)|\w+[^s]s) ")
NOUNS = {"process", "address", "focus", "bypass", "pass", "miss", "feed", "need", "seed", "embed", "bring", "string"}


@pytest.fixture(scope="module")
def measured() -> dict[str, Prose]:
    """The text of the repository as it is."""
    return by_folder(ROOT)


def test_the_text_gets_no_harder_to_read(measured: dict[str, Prose]) -> None:
    """Each folder stays below its limit. `embarcadero-proof prose FOLDER` lists the lines, `--lower` lowers limits."""
    allowed = limits(ROOT)
    above = {
        name: f"{prose.per_thousand:.1f} per 1,000 words, at most {allowed.get(name, NEW_FOLDER_MAX)}"
        for name, prose in measured.items()
        if prose.per_thousand > allowed.get(name, NEW_FOLDER_MAX)
    }

    assert not above


def test_sentences_are_short(measured: dict[str, Prose]) -> None:
    """The median sentence of each folder has at most 16 words."""
    assert not {name: prose.median for name, prose in measured.items() if prose.median > 16}


def test_every_limit_has_its_folder(measured: dict[str, Prose]) -> None:
    """A limit without a folder would hide a folder that moved."""
    assert not limits(ROOT).keys() - measured.keys(), f"remove these lines from {LIMITS}"


def test_the_measure_counts_each_construction() -> None:
    """Each construction counts in prose; code, addresses and questions do not."""
    prose = Prose()
    prose.add("Whoever reads what is left is told so, one that waits for ever; its heart is to be heard of.")
    quiet = Prose()
    quiet.add(
        markdown("What is a lane? See `what is left` and [here](what-is.md).\n\n    nobody\n\n```\nwhoever\n```\n")
    )
    pieces = python('"""A thing."""\n\ndef test_who_is_gone_stays():  # nobody\n    raise ValueError("of what")\n')

    assert len(prose.found) == 7
    assert quiet.found.total() == 0
    assert pieces == ["A thing.", "of what", "who is gone stays", "nobody"]


def test_commit_subjects_follow_the_rules() -> None:
    """Imperative, at most 72 characters, with the area first."""
    command = ["git", "-C", str(ROOT), "log", "--no-merges", "--format=%s", f"{CHECKED_FROM}..HEAD"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    if told.returncode != 0:
        pytest.skip("the history from the first checked commit on is not here")
    wrong = []
    for subject in told.stdout.splitlines():
        odd = PAST_OR_THIRD.search(subject)
        if len(subject) > 72 or not SUBJECT.fullmatch(subject) or (odd and odd.group(1) not in NOUNS):
            wrong.append(subject)

    assert not wrong
