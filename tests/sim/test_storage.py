"""Range storage on simulated disks: whatever breaks, synced records are there, and nothing else is."""

from __future__ import annotations

import random

import pytest

from embarcadero.errors import BadSegment, DiskFailed, DiskFull, EmbarcaderoError
from embarcadero.storage.range_log import RangeLog
from embarcadero_proof.sim.disk import Mount, SimDisk
from embarcadero_proof.sim.truth import records, segments
from tests.storage.records import START, Source, matches, open_log, open_reader

SEEDS = 60
STEPS = 40


class Storm:
    """One range on one disk, under faults. `promised` is the end of the last sync."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"storm-{seed}")
        self.disk = SimDisk(f"storm-{seed}")
        self.mount = Mount(lambda: self.disk)
        self.source = Source(seed)
        self.log: RangeLog = open_log(self.mount)
        self.promised = START

    def step(self) -> None:
        """Inject a random action."""
        act = self.rng.choice([self.append] * 5 + [self.sync] * 4 + [
            self.power_cut, self.kill, self.failing_sync, self.full, self.cut])  # fmt: skip
        act()

    def append(self) -> None:
        self.log.append(*self.source.span(self.log.end, self.log.end + self.rng.randint(1, 9)))

    def sync(self) -> None:
        self.promised = max(self.promised, self.log.sync_job()())

    def power_cut(self) -> None:
        self.disk.lose_power()
        self.reopen()

    def kill(self) -> None:
        if self.rng.random() < 0.5:
            self.disk.drop_caches()
        self.reopen()

    def reopen(self) -> None:
        """Also opening may be cut short, any number of times."""
        while self.rng.random() < 0.3:
            self.mount = Mount(lambda: self.disk, self._interrupt)
            try:
                open_log(self.mount)
            except _Killed:
                if self.rng.random() < 0.5:
                    self.disk.lose_power()
        self.mount = Mount(lambda: self.disk)
        self.log = open_log(self.mount)
        self.check()

    def _interrupt(self) -> None:
        if self.rng.random() < 0.1:
            raise _Killed

    def failing_sync(self) -> None:
        self.append()
        self.disk.failing_syncs = 1
        with pytest.raises(DiskFailed):
            self.sync()
        if self.rng.random() < 0.5:
            self.log.cut(self.log.synced)
        else:
            self.kill()

    def full(self) -> None:
        self.disk.full = True
        try:
            self.append()
            self.sync()
        except DiskFull:
            pass
        except EmbarcaderoError:
            self.disk.full = False
            self.log.cut(self.log.synced)
        self.disk.full = False

    def cut(self) -> None:
        """Seal a range below the end of this copy."""
        if self.rng.random() < 0.3:
            index = self.rng.randint(START, self.log.end)
            self.log.cut(index)
            self.promised = min(self.promised, index)

    def check(self) -> None:
        """All promised records are here, and all records here are correct, for readers and on the medium itself."""
        assert self.promised <= self.log.end
        assert not self.log.damage
        assert matches(open_reader(self.mount), self.source, START, self.log.end)
        found = [record.at_index for *_, file in segments(self.disk) for record in records(file.medium)]
        assert set(range(START, self.log.end)) <= set(found)


class _Killed(BaseException):
    """Kill the process."""


@pytest.mark.parametrize("seed", range(SEEDS))
def test_synced_records_survive_everything(seed: int) -> None:
    """Random appends, syncs, power cuts, kills, failed syncs, full disks and cuts; recovery is interrupted too."""
    storm = Storm(seed)
    for _ in range(STEPS):
        storm.step()
    storm.power_cut()


@pytest.mark.parametrize("seed", range(40))
def test_a_flipped_bit_is_never_served_and_cuts_nothing_off(seed: int) -> None:
    """After bit rot and a restart, a reader gets correct records or an error; nothing after the damage is dropped."""
    storm = Storm(seed)
    for _ in range(25):
        storm.append()
    storm.sync()
    end = storm.log.end
    assert storm.disk.flip_a_bit(lambda path: path.endswith((".log", ".index", ".timeindex"))) is not None
    if seed % 2:
        storm.disk.lose_power()
    storm.log = open_log(storm.mount)
    reader, at = open_reader(storm.mount), START
    first_bad = min((damage.first for damage in storm.log.damage), default=end)
    for at in range(START, end):
        try:
            entries, payloads = reader.read(at, at + 1, 10_000)
        except BadSegment:
            continue
        if not len(entries):
            assert at >= first_bad
            continue
        expected = storm.source.span(at, at + 1)
        assert (entries.tobytes(), [bytes(p) for p in payloads]) == (expected[0].tobytes(), expected[1])
    assert storm.log.end == end or storm.log.damage
