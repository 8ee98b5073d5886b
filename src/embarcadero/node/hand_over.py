"""A planned move: another candidate becomes the sequencer while the one that reigns still works."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import msgspec

from embarcadero.errors import BadValue, ClusterError
from embarcadero.limits import HAND_OVER_S_MAX
from embarcadero.node.bell import ring_once
from embarcadero.node.cluster import ClusterFolder
from embarcadero.node.seat import candidate_bell
from embarcadero.placement.directory import Directory
from embarcadero.placement.embedded import SqliteStore

_POLL_S = 0.01


class HandedOver(msgspec.Struct, frozen=True, kw_only=True):
    """Who reigned, who reigns now, and how long it took from asking to the start of the new epoch."""

    before: int
    now: int
    epoch: int
    seconds: float


def hand_over(folder: ClusterFolder, to: int | None = None) -> HandedOver:
    """Have candidate `to` (None: any that stands by) take over, and wait until it has."""
    info = folder.require_running()
    with closing(SqliteStore(folder.store_path)) as store:
        directory = Directory(store)
        epoch, before = directory.started_epoch(), _reigning(directory)
        chosen = _choose(directory, before, to)
        began = time.monotonic()
        directory.ask_hand_over(chosen, epoch)
        ring_once(Path(info.fabric), candidate_bell(chosen))
        while (now := directory.started_epoch()) == epoch:
            if time.monotonic() - began > HAND_OVER_S_MAX:
                directory.call_off_hand_over()
                raise ClusterError(
                    f"sequencer {chosen} did not take over within {HAND_OVER_S_MAX:.0f} s", f"see {folder.logs}"
                )
            time.sleep(_POLL_S)
        seconds = time.monotonic() - began
        return HandedOver(before=before, now=_reigning(directory), epoch=now, seconds=round(seconds, 4))


def _reigning(directory: Directory) -> int:
    reign = directory.reign()
    if reign is None or reign.epoch != directory.newest_epochs().handed_out:
        raise ClusterError("no sequencer has started yet", "wait a moment, and see `embarcadero status`")
    return reign.candidate


def _choose(directory: Directory, reigning: int, to: int | None) -> int:
    standing = [found.candidate for found in directory.candidates() if found.candidate != reigning]
    if to is not None and to == reigning:
        raise BadValue(f"sequencer {to} reigns already", f"choose one that stands by: {_listed(standing)}")
    if not standing:
        raise ClusterError(
            "no sequencer stands by", "start the cluster with --standbys 1 or more; one that died is started again soon"
        )
    if to is not None and to not in standing:
        raise BadValue(f"no sequencer {to} stands by", f"there are: {_listed(standing)}")
    return standing[0] if to is None else to


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none does now"
