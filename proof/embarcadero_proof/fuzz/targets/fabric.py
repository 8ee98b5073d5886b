"""Shared memory with garbage, wrong superblocks, or torn lines: regions of a working cluster, and a takeover."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from random import Random
from typing import Final

import numpy as np

from embarcadero.errors import EmbarcaderoError
from embarcadero.fabric.layout import ORDER, SUPERBLOCK, Entries, RegionKind, seal, sealed, superblock_check
from embarcadero.fabric.leader import EpochTable
from embarcadero.fabric.lines import RingReader, TaggedReader
from embarcadero.fabric.log import LogReader
from embarcadero.fabric.region import EPOCHS_REGION, Bytes
from embarcadero.limits import LINE_BYTES, MIB
from embarcadero.sequencer.leader.takeover import PredecessorState, readmit
from embarcadero.sequencer.order.batches import LaneOrder
from embarcadero.sequencer.order.checkpoint import parse_checkpoint, read_checkpoint
from embarcadero.sequencer.order.sessions import ReorderBuffer
from embarcadero.types import Member, Order, Topic
from embarcadero.watch.regions import RINGS, check_shape, read_region
from embarcadero.wire.codec import payload_crc
from embarcadero_proof.fuzz.mutate import NUMBERS
from embarcadero_proof.fuzz.target import Inputs, Target, agree
from embarcadero_proof.fuzz.world import GENERATION, SIZES, Images, PlainFabric, busy_lines, worked

_EDIT: Final = struct.Struct("<HIH")
_LONGEST: Final = 256
_EDITS_MAX: Final = 8
Edits = list[tuple[int, int, bytes]]


# --- inputs: edits of a real fabric -----------------------------------------------------------------------------------
def encode(edits: Edits) -> bytes:
    """Encode edits as an input: region by number, offset, bytes."""
    return b"".join(_EDIT.pack(region, offset, len(data)) + data for region, offset, data in edits)


def decode(data: bytes) -> Edits:
    """Return the edits of an input, as far as they are whole."""
    edits, at = [], 0
    while at + _EDIT.size <= len(data):
        region, offset, length = _EDIT.unpack_from(data, at)
        at += _EDIT.size
        if at + length > len(data):
            break
        edits.append((region, offset, data[at : at + length]))
        at += length
    return edits


@cache
def _names() -> list[str]:
    return sorted(worked()[1])


@cache
def _busy(name: str) -> list[int]:
    return list(busy_lines(worked()[1][name]))


@contextmanager
def edited(data: bytes) -> Iterator[tuple[PlainFabric, set[str]]]:
    """Yield the fabric of a working cluster with these edits, and the edited regions. Undo the edits afterwards."""
    images: Images = dict(worked()[1])
    undo: list[tuple[Bytes, int, Bytes]] = []
    touched: set[str] = set()
    for region, offset, content in decode(data):
        name = _names()[region % len(images)]
        touched.add(name)
        if not content:
            images[name] = images[name][:offset]  # an edit without bytes: the file ends there
        elif len(image := images[name]):
            at = offset % len(image)
            fitting = np.frombuffer(content[: len(image) - at], dtype=np.uint8)
            undo.append((image, at, image[at : at + len(fitting)].copy()))
            image[at : at + len(fitting)] = fitting
    try:
        yield PlainFabric(images, GENERATION), touched
    finally:
        for image, at, before in reversed(undo):
            image[at : at + len(before)] = before


def _mutate(data: bytes, rng: Random, pool: Inputs) -> bytes:
    edits = decode(data)
    choice = rng.random()
    if edits and choice < 0.1:
        del edits[rng.randrange(len(edits))]
    elif choice < 0.2:
        edits += decode(rng.choice(pool))
    elif choice < 0.22:
        edits.append((rng.randrange(len(_names())), rng.choice(NUMBERS) & 0xFFFF, b""))
    while len(edits) < 1 or rng.random() < 0.4:
        edits.append(_edit(rng))
    return encode(edits[-_EDITS_MAX:])


def _edit(rng: Random) -> tuple[int, int, bytes]:
    """Make a change of some line in use."""
    region = rng.randrange(len(_names()))
    name = _names()[region]
    image, lines = worked()[1][name], _busy(name)
    offset = rng.choice((0, 0, SUPERBLOCK.itemsize, *lines[-40:])) if rng.random() < 0.9 else rng.randrange(len(image))
    offset -= offset % 8
    size = SUPERBLOCK.itemsize if offset == 0 else LINE_BYTES
    line = bytearray(image[offset : offset + size].tobytes())
    for _ in range(rng.choice((1, 1, 2, 4))):
        width = rng.choice((1, 2, 4, 8))
        at = rng.randrange(max(1, len(line) // width)) * width
        old = int.from_bytes(line[at : at + width], "little")
        new = old + rng.randint(-3, 3) if rng.random() < 0.3 else rng.choice((*NUMBERS, old ^ 1 << rng.randrange(64)))
        line[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    if rng.random() < 0.8:
        line[:] = _mended(bytes(line), name, offset)
    return region, offset, bytes(line)


def _mended(line: bytes, name: str, offset: int) -> bytes:
    """Return a line with the check that its position requires."""
    if offset == 0:
        block = np.frombuffer(line, dtype=SUPERBLOCK).copy()
        block["magic"], block["generation"] = np.frombuffer(worked()[1][name][:128].tobytes(), SUPERBLOCK)[
            ["magic", "generation"]
        ][0]
        block["check"] = superblock_check(block)
        return block.tobytes()
    if "checkpoint" in name:
        return line[:124] + payload_crc(line[:124]).to_bytes(4, "little") if len(line) == 128 else line
    return seal(np.frombuffer(line, dtype=ORDER).copy()).tobytes() if len(line) == LINE_BYTES else line


def _corpus() -> Inputs:
    """Return the unchanged fabric, and each region with its own bytes written over it."""
    images = worked()[1]
    inputs = [b""]
    for number, name in enumerate(_names()):
        image = images[name]
        inputs.append(encode([(number, offset, image[offset : offset + 64].tobytes()) for offset in _busy(name)[:4]]))
    return inputs


# --- reading ----------------------------------------------------------------------------------------------------------
def _regions(data: bytes) -> str:
    """Read every changed region as roles and operators read it; only whole entries count."""
    answers = set()
    with edited(data) as (fabric, touched):
        for name in sorted(touched):
            try:
                answers.add(_read(fabric, name))
                check_shape(name, fabric.attach(name).shape)
                read_region(fabric, name, None, 20)  # type: ignore[arg-type]
            except EmbarcaderoError as error:
                answers.add(f"{type(error).__name__} {error.message}")
    return "; ".join(sorted(answers)[:2])


def _read(fabric: PlainFabric, name: str) -> str:
    region = fabric.attach(name)
    kind = region.shape.kind
    if kind in RINGS:
        ring = RingReader(region, *RINGS[kind])
        frontier = ring.frontier.load()
        start = max(0, min(frontier, 1 << 62) - ring.slots)
        found = ring.read(start, start + ring.slots)
        agree(bool(sealed(found).all()), "an entry that is not sealed")
        agree(ring.valid_end(start) >= start + len(found), "valid entries end before those that were read")
        return f"{kind.name} {min(len(found), 2)}"
    if kind in (RegionKind.DURABLE, RegionKind.RANGES):
        lines = TaggedReader(region)
        keys = lines.keys()
        agree(len(keys) <= region.shape.slots, "more lines than the region has space for")
        for key in keys[:9]:
            lines.load(key)
        return f"{kind.name} {min(len(keys), 3)}"
    if kind is RegionKind.CHECKPOINT:
        found_checkpoint = read_checkpoint(fabric, name)
        if found_checkpoint is not None:
            agree(parse_checkpoint(found_checkpoint.data()) is not None, "a checkpoint that does not read back")
        return f"checkpoint {found_checkpoint is not None}"
    if name == EPOCHS_REGION:
        epochs = EpochTable(fabric, region)
        return f"epochs {epochs.superseded(1)} {epochs.newest_started(0)}"
    if kind is RegionKind.LOG:
        frontiers = fabric.attach(name.rpartition("/")[0] + "/frontiers")
        reader = LogReader(region, frontiers)
        return f"log {reader.copy(0, 64) is not None}"
    return kind.name


def _takeover(data: bytes) -> str:
    """Run a takeover from these regions: it uses whole contiguous entries, or raises a typed error."""
    world, _ = worked()
    with edited(data) as (fabric, _):
        state = PredecessorState(fabric, world.directory.elections.started_epoch(), _members())
        held, orders = ReorderBuffer(SIZES.held_slots), {}
        story: list[str] = []
        for topic in _topics():
            found = state.lane(topic, SIZES, held, world.clock.us)
            if found is not None:
                orders[topic.lane], again = found
                _check_again(orders[topic.lane], again)
                story.append(f"{min(len(again), 9)} again")
        readmit(orders, held, state.waiting, world.clock.us)
    return f"{story}, {min(len(state.waiting), 5)} wait"


@cache
def _members() -> list[Member]:
    return worked()[0].directory.members.all()


@cache
def _topics() -> list[Topic]:
    return [topic for topic in worked()[0].directory.topics.all() if topic.order >= Order.TOTAL]


def _check_again(order: LaneOrder, again: Entries) -> None:
    agree(bool(sealed(again).all()), "a re-issued entry is not sealed")
    if len(again):
        first = int(again["index"][0])
        agree(again["index"].tolist() == list(range(first, first + len(again))), "entries with a hole")
        agree(order.next_index == first + len(again), "the order does not continue at the end of its entries")


FABRIC: Final = (
    Target("regions", "every region of a cluster at work: superblocks, rings, lines, checkpoints", _corpus, _regions,
           _mutate, memory_bytes=64 * MIB),
    Target("takeover", "a new sequencer over the regions of its predecessor", _corpus, _takeover, _mutate,
           memory_bytes=64 * MIB),
)  # fmt: skip
