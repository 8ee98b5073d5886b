"""The way of a record in ARCHITECTURE.md is the one that a record takes: one is followed through a real cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from embarcadero_proof.crossing import Crossed, Leg, crossings

TEXT: Final = (Path(__file__).parent.parent.parent / "ARCHITECTURE.md").read_text()


class Step(NamedTuple):
    """A row of the table: what runs in its files, on which leg of the way."""

    leg: str
    functions: tuple[str, ...]


STEPS: Final = {
    1: Step("durable", ("ThreadedPublisher.send", "Intake.add")),
    2: Step("durable", ("PublisherCore.add",)),
    3: Step("durable", ("batch_header",)),
    4: Step("durable", ("Connection.received", "FrameReceiver.received")),
    5: Step("durable", ("Ingest.stage_batch", "LogWriter.reserve")),
    6: Step("durable", ("Ingest.publish", "RingWriter.publish")),
    7: Step("durable", ("order_one",)),
    8: Step("durable", ("Lane.publish",)),
    9: Step("ordered", ("Relay.poll",)),
    10: Step("durable", ("Follower._gather_one",)),
    11: Step("durable", ("RangeLog.append",)),
    12: Step("durable", ("Commits.publish",)),
    13: Step("durable", ("Durability.through", "AwaitingLane.settle")),
    14: Step("memory", ("LaneReader.locate",)),
    15: Step("disk", ("DiskReads.fetch",)),
    18: Step("disk", ("SubscriberCore.on_fetched",)),
}
"""By number: a function in each file that the row names. A function that is renamed or moved is renamed here, too."""

OF_TABLES: Final = {16, 17}
"""Rows about a topic's table. No table is on the way of this record."""

IN_TURN: Final = (1, 2, 3, 4, 5, 7, 8, 10, 11, 12)
"""Steps that begin one after the other. Others have functions that also run on an idle cluster."""


@pytest.fixture(scope="module")
def crossed() -> Crossed:
    """One record's way, to each ack and to readers of memory and disk."""
    return crossings()


def rows() -> dict[int, list[str]]:
    """The files of each row of the table, by its number."""
    table = TEXT.partition("## The way of a record")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (\d+) \|[^|]*\|([^|]*)\|", table, re.MULTILINE)
    return {int(number): re.findall(r"`([a-z_/]+\.py)`", files) for number, files in found}


def leg_of(crossed: Crossed, step: Step) -> Leg:
    """The leg on which a step is."""
    found: Leg = getattr(crossed, step.leg)
    return found


def test_every_row_is_followed() -> None:
    """Each row names files, and each file has a function here."""
    table = rows()
    assert table.keys() == STEPS.keys() | OF_TABLES
    assert {number: len(table[number]) for number in STEPS} == {
        number: len(step.functions) for number, step in STEPS.items()
    }


@pytest.mark.parametrize("number", STEPS)
def test_the_functions_of_a_row_run(crossed: Crossed, number: int) -> None:
    """In the files that the row names, in their order."""
    ran = leg_of(crossed, STEPS[number]).ran
    for file, name in zip(rows()[number], STEPS[number].functions, strict=True):
        there = sorted(function.name for function in ran if function.file == file)
        assert name in there, f"step {number}: {name} did not run in {file}; there ran {', '.join(there) or 'nothing'}"


def test_steps_follow_each_other(crossed: Crossed) -> None:
    """By the clock of the machine: a batch is stored before it is ordered, and ordered before it is copied."""
    first = {function.name: at_s for function, at_s in crossed.durable.functions.items()}
    begins = [first[name] for number in IN_TURN for name in STEPS[number].functions[:1] if name in first]
    assert len(begins) >= len(IN_TURN) - 2, "most of these do not run on an idle cluster"
    assert begins == sorted(begins)


def test_an_idle_cluster_says_nothing_about_a_record(crossed: Crossed) -> None:
    """What runs anyway is left out: a leg has fewer files with functions of the record than files with any."""
    for leg in crossed:
        assert leg.files < leg.all_files
        assert not leg.functions.keys() & leg.idle
    assert [line[1].split()[:2] for line in crossed.table()] == [
        [f"{len(leg.files)}", f"({len(leg.all_files)})"] for leg in crossed
    ]
