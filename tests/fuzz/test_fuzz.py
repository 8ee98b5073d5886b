"""The fuzzer itself: it is deterministic, detects violations, and minimizes findings."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from embarcadero.errors import BadValue
from embarcadero.storage import scan, segment
from embarcadero.wire import codec, schemas
from embarcadero_proof.fuzz.archive import MENDED, archive_mutation, pack, unpack
from embarcadero_proof.fuzz.campaign import Campaign
from embarcadero_proof.fuzz.guard import judge, watched
from embarcadero_proof.fuzz.run import Settings, again, chosen, report, rows, run
from embarcadero_proof.fuzz.shrink import shrunk
from embarcadero_proof.fuzz.target import Disagreement, Target
from embarcadero_proof.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


@pytest.fixture(autouse=True)
def _watching() -> Iterator[None]:
    with watched():
        yield


def target_of(run_it: Any, *inputs: bytes, **more: Any) -> Target:
    """A target that runs this."""
    return Target("made-up", "for a test", lambda: list(inputs) or [b"some bytes that are an input"], run_it, **more)


# --- real targets -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(TARGETS))
def test_real_inputs_and_some_changes_of_them(name: str) -> None:
    """At least one input accepts the output of the product's own encoders, and some changes of it find nothing."""
    slow = name in {"broker", "takeover", "regions", "recovery", "segments", "store-files", "config-files"}
    campaign = Campaign(TARGETS[name], "tests")
    real = TARGETS[name].corpus()
    for data in real[:: -(-len(real) // (5 if slow else 25))]:
        campaign.give(data)
    for _ in range(3 if slow else 20):
        campaign.give(campaign.next())

    assert not [finding.story for finding in campaign.tally.findings]
    assert campaign.tally.success


@pytest.mark.parametrize("path", sorted(CORPUS.glob("*/*")), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_fixed_findings_stay_fixed(path: Path) -> None:
    """Every finding that was fixed is an input of this test."""
    verdict = judge(TARGETS[path.parent.name], path.read_bytes())

    assert not verdict.finding, verdict.story


# --- injected bugs ----------------------------------------------------------------------------------------------------
def found_in(name: str, inputs: int, seed: str = "planted") -> set[str]:
    """The kind of the first finding, if any, among this many inputs. Findings are not minimized here."""
    campaign = Campaign(TARGETS[name], seed)
    for _ in range(inputs):
        if (verdict := judge(TARGETS[name], campaign.next())).finding:
            return {verdict.kind}
    return set()


def test_a_trusted_length_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit on control frames an unknown client can make a broker allocate any amount of memory."""
    limits = codec._LENGTH_MAX | {codec.FrameKind.CONTROL: 1 << 32}
    monkeypatch.setattr(codec, "_LENGTH_MAX", limits)
    data = codec.PREFIX.pack(codec.WORDS[codec.FrameKind.CONTROL], 1 << 28) + bytes(8)

    assert judge(TARGETS["frames-from-strangers"], data).kind == "memory"
    assert "memory" in found_in("frames-from-strangers", 700)


def test_a_trusted_unpacked_length_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a check of the sum of claimed buffer sizes, Arrow allocates as much as a payload claims."""
    monkeypatch.setattr(schemas, "check_unpacked", lambda *_: None)
    monkeypatch.setattr(schemas, "check_unpacked", lambda *_: None)

    assert "memory" in found_in("payloads", 1_500)


def test_an_unchecked_checksum_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the CRC of payloads a reader of damaged segments serves bytes that were never ordered."""
    monkeypatch.setattr(segment, "intact", lambda _data, _entries, offsets: len(offsets))

    assert "disagreement" in found_in("segments", 60)


def test_an_unchecked_entry_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of entries, damaged ones are served."""
    monkeypatch.setattr(scan, "sealed", lambda entries: np.ones(len(entries), dtype=bool))

    assert "disagreement" in found_in("segments", 60, "again")


def test_an_untyped_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that lets a library's error through."""
    monkeypatch.setattr(codec, "decode_control", codec._decode_message)

    assert "untyped" in found_in("control-messages", 40)


def test_inconsistent_pieces_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receiver that forgets the start of a header when a read ends in it."""
    real = codec.FrameReceiver._scan

    def forgetful(self: Any, size: int, events: list[Any]) -> None:
        real(self, size, events)
        self._kept = self._kept[:8]

    monkeypatch.setattr(codec.FrameReceiver, "_scan", forgetful)

    assert found_in("frames-from-clients", 60) & {"disagreement", "untyped"}


# --- the guard --------------------------------------------------------------------------------------------------------
def test_verdicts() -> None:
    """Success, a typed error, and everything else."""

    def crooked(data: bytes) -> str:
        match data[:1]:
            case b"t":
                raise BadValue("no")
            case b"d":
                raise Disagreement("two answers")
            case b"m":
                bytearray(64 << 20)
            case b"h":
                while True:
                    pass
            case b"u":
                raise KeyError("x")
            case b"s":
                raise BadValue("no") from MemoryError("asked for too much")
        return "yes"

    target = target_of(crooked)
    kinds = {data: judge(target, data).kind for data in (b"", b"t", b"d", b"m", b"u", b"s")}

    assert kinds == {
        b"": "success", b"t": "refused", b"d": "disagreement", b"m": "memory", b"u": "untyped", b"s": "memory",
    }  # fmt: skip


def test_a_hang_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that would take forever is given up, also if the code under test swallows all exceptions."""
    monkeypatch.setattr("embarcadero_proof.fuzz.guard.HANG_CPU_S", 0.05)

    def endless(_data: bytes) -> None:
        while True:
            try:
                while True:
                    pass
            except Exception:
                continue

    assert judge(target_of(endless), b"").kind == "hang"


def test_same_seed_same_inputs() -> None:
    """Everything follows from the seed."""

    def given(seed: str) -> list[bytes]:
        seen: list[bytes] = []
        Campaign(TARGETS["identities"], seed, seen.append).run(40, None)
        return seen

    assert given("1") == given("1") != given("2")


def test_findings_are_minimized() -> None:
    """Irrelevant chunks are removed, in bytes and in folders."""

    def picky(data: bytes) -> None:
        if b"needle" in data:
            raise KeyError("found")

    tally = Campaign(target_of(picky, b"x" * 500 + b"needle" + b"y" * 500), "1").run(1, None)
    folder = pack({"a": b"1" * 300, "b": b"2" * 99 + b"needle", "c": b""})

    assert [finding.data for finding in tally.findings] == [b"needle"]
    assert unpack(shrunk(folder, lambda data: b"needle" in data, archive=True)) == {"b": b"needle"}


def test_folders() -> None:
    """Folders survive packing; names that lead outside do not; mutations keep them folders."""
    files = {"a/b": b"1", "c": b""}
    assert unpack(pack(files)) == files
    assert unpack(pack({"../x": b"", "/y": b"", "a//b": b"", "": b""})) == {}
    rng, mutate = Random(1), archive_mutation()
    assert all(isinstance(unpack(mutate(pack(files), rng, [pack(files)])), dict) for _ in range(50))


# --- processes --------------------------------------------------------------------------------------------------------
def test_a_repaired_folder_is_marked() -> None:
    """A file in a repaired folder marks it, and is never left out: otherwise records would have to be original."""
    rng, mutate = Random(1), archive_mutation()
    mended = pack({"a": b"mended", MENDED: b""})
    made = [unpack(mutate(pack({"a": b"true"}), rng, [mended])) for _ in range(500)]
    assert any(files.get("a") == b"mended" for files in made)
    assert all(MENDED in files for files in made if files.get("a") == b"mended")
    assert MENDED in unpack(shrunk(mended, lambda data: b"m" in data, archive=True))


def test_a_process_that_dies_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that ends the process is detected from outside, minimized, saved, and the run continues."""

    def deadly(data: bytes) -> str:
        if b"!" in data:
            os.kill(os.getpid(), signal.SIGSEGV)
        return "fine"

    monkeypatch.setitem(TARGETS, "made-up", target_of(deadly, b"good", b"more ! and more"))
    settings = Settings(targets=("made-up",), inputs=6, seed="1", jobs=1)
    (tally,) = run(settings, tmp_path)
    summary = report(settings, [tally], 1.0)

    assert tally.findings[0].kind == "crash"
    assert tally.findings[0].data == b"!"
    assert (tmp_path / "made-up").is_dir()
    assert "--target made-up --input" in tally.findings[0].command
    assert summary["verdict"] == "failed"
    assert rows([tally])[0][0] == "made-up"


def test_one_input_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A saved input is run again by name; an unknown target is an error with its name."""
    (tmp_path / "input").write_bytes(b"{")
    assert again("identities", tmp_path / "input") == 0
    assert "WrongFolder" in capsys.readouterr().out
    with pytest.raises(BadValue, match="there is no target nonsense"):
        chosen(("nonsense",))
