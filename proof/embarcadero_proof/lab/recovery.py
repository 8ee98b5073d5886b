"""The time to open a replica's copy again after a crash: with 10 sealed segments, and with 100."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np

from embarcadero.fabric.layout import ORDER, Entries, seal
from embarcadero.limits import MIB
from embarcadero.storage.disk import RealDisk
from embarcadero.storage.range_log import RangeLog
from embarcadero.storage.segment import RangeSettings
from embarcadero.types import EntryKind
from embarcadero.wire.codec import payload_crc
from embarcadero_proof.lab.settings import Settings
from embarcadero_proof.lab.trial import Announce, Trial

SEGMENTS: Final = (10, 100)
_PAYLOAD: Final = bytes(MIB)
_BATCHES_PER_SEGMENT: Final = 2
_SETTINGS: Final = RangeSettings(cluster="bench", segment_bytes=_BATCHES_PER_SEGMENT * (MIB + 64) + 256)


def _entry(index: int) -> Entries:
    entry = np.zeros(1, dtype=ORDER)
    entry["index"] = entry["seq"] = entry["session_seq"] = entry["append_us"] = index
    entry["size"], entry["count"], entry["crc"], entry["kind"] = MIB, 1, payload_crc(_PAYLOAD), EntryKind.BATCH
    return seal(entry)


def _opened(folder: Path) -> tuple[RangeLog, float]:
    began = time.perf_counter()
    log = RangeLog.recover(RealDisk(folder), "range", 0, 1, 0, 0, _SETTINGS)
    return log, time.perf_counter() - began


def measure_recovery(settings: Settings, trial: Trial, announce: Announce) -> None:  # noqa: ARG001 - the same for all runs
    """Fill copies, and open each again; the active segment is half full in both."""
    for segments in SEGMENTS:
        announce(f"start-up with {segments} sealed segments")
        with tempfile.TemporaryDirectory(prefix="embarcadero-bench-") as folder:
            log, _ = _opened(Path(folder))
            for index in range(segments * _BATCHES_PER_SEGMENT + 1):
                log.append(_entry(index), [_PAYLOAD])
            log.sync_job()()
            log.close()
            again, trial.values[f"recovery_{segments}"] = _opened(Path(folder))
            again.close()
    trial.values["recovery_growth"] = trial.values["recovery_100"] / trial.values["recovery_10"]
