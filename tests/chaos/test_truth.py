"""The expected content that readers are checked against: each kind of deviation is noticed."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pytest

from embarcadero.types import Order, Position
from embarcadero_proof.chaos.streams import RECORD
from embarcadero_proof.chaos.truth import Acked, Seen, Truth, seen

LANE = 4


def log(*names: tuple[int, int], first: int = 0) -> Seen:
    """A topic that holds these records (stream, number), from seq `first` on."""
    values = [RECORD.pack(*name) + b"..." for name in names]
    return seen(pa.table({"value": values, "_seq": np.arange(first, first + len(names), dtype=np.uint64)}), LANE)


def acks(*seqs: int | None, stream: int = 1) -> Acked:
    """Records 0, 1, ... of a stream, acked at these seqs."""
    return {stream: {n: None if seq is None else Position(LANE, seq, seq) for n, seq in enumerate(seqs)}}


def problems(order: int, acked: Acked, *reads: Seen, weak: Collection[int] = ()) -> str:
    truth = Truth("t", order, frozenset(weak))
    for read in reads:
        truth.check(acked, read)
    return " ".join(truth.problems)


def test_a_whole_log_is_correct() -> None:
    """Two streams, interleaved, with more records than were acked: no findings."""
    now = log((1, 0), (2, 0), (1, 1), (2, 1))
    assert problems(Order.STRONG, acks(0, 2), now, now) == ""


def test_an_ack_without_a_position_holds_wherever_its_record_is() -> None:
    """A record that was stored too long ago for its position to be known may be anywhere."""
    assert problems(Order.TOTAL, acks(None, 0), log((1, 1), (2, 0), (1, 0)), weak={1}) == ""


def test_weak_streams_have_no_order_to_keep() -> None:
    """In a topic of both kinds only strong streams must be in order; below order 2 none must."""
    now = log((1, 1), (2, 1), (1, 0), (2, 0))
    assert problems(Order.TOTAL, {}, now, weak={1, 2}) == ""
    assert problems(Order.BROKER, {}, now) == ""
    found = problems(Order.TOTAL, {}, now, weak={1})
    assert "stream 2: record 1 came where 0 was due" in found
    assert "stream 1" not in found


@pytest.mark.parametrize(
    ("order", "acked", "reads", "complaint"),
    [
        (Order.TOTAL, acks(0, 1), [log((1, 0))], "is not there"),
        (Order.TOTAL, acks(0, 1), [log((1, 0), (2, 0), (1, 1))], "is not there"),
        (Order.TOTAL, acks(0, None), [log((1, 0), (2, 1))], "acked without a position, is not there"),
        (Order.TOTAL, acks(0), [log((1, 0), (1, 1), (1, 1))], "more than once"),
        (Order.STRONG, {}, [log((1, 1), (1, 0))], "came where 0 was due"),
        (Order.STRONG, {}, [log((1, 0), (1, 2))], "came where 1 was due"),
        (Order.TOTAL, {}, [log((1, 1), (1, 0))], "came where 0 was due"),
        (Order.TOTAL, {}, [log((1, 0), (1, 2))], "came where 1 was due"),
        (Order.BROKER, {}, [log((1, 0), (1, 1)), log((1, 0))], "read before"),
        (Order.BROKER, {}, [log((1, 0)), log((2, 0), (1, 0))], "read before"),
        (Order.BROKER, {}, [log((1, 0)), log((1, 0), first=1)], "read before"),
    ],
)
def test_every_deviation_is_noticed(
    order: int, acked: Acked, reads: list[Seen], complaint: str
) -> None:
    """Lost, moved, duplicated, out of order, with a hole, changed after a reader read it."""
    assert complaint in problems(order, acked, *reads)
