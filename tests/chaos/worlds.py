"""Small histories of a correct cluster, for tests of the code that judges and draws them."""

from __future__ import annotations

from embarcadero.types import Order
from embarcadero_proof.sim.history import (
    Began,
    Copies,
    Delivered,
    Ended,
    Event,
    Fault,
    Healed,
    History,
    Moved,
    OnDisk,
    Sent,
    Settled,
    TailRead,
    TopicMade,
    Verdict,
)

LANE, BATCHES, RECORDS = 3, 60, 4
STEP_US = 10_000


def digest(number: int) -> int:
    return 1_000 + number


def honest(ack: int = 2) -> list[Event]:
    """One order-5 topic, one stream of batches each acked 2 ms after it was sent, read twice; a fault in between."""
    events: list[Event] = [
        TopicMade(at=0, lane=LANE, name="t", order=Order.STRONG, on_gap="fence", replicas=3, durable_on=2),
        Began(at=0, process="s", stream="s"),
        Moved(at=0, reader="live", lane=LANE, index=0),
        Fault(at=1, kind="kill", target="broker:0", until=200_000),
    ]
    for number in range(BATCHES):
        at = 1_000 + number * STEP_US
        events.append(Sent(at=at, process="s", stream="s", lane=LANE, number=number, digest=digest(number),
                           count=RECORDS))  # fmt: skip
        events.append(Settled(at=at + 2_000, process="s", stream="s", lane=LANE, number=number, ack=ack,
                              verdict=Verdict.STORED, index=number + 1, seq=number * RECORDS))  # fmt: skip
        events.append(read("live", number, at + 3_000))
    end = 2_000 + BATCHES * STEP_US
    events += [Healed(at=end), Moved(at=end, reader="again", lane=LANE, index=0)]
    events.append(TailRead(at=end + 1, process="asker", began=end, lane=LANE, index=BATCHES + 1, seq=BATCHES * RECORDS,
                           durable_index=BATCHES + 1))  # fmt: skip
    events += [read("again", number, end + 2) for number in range(BATCHES)]
    for number in range(BATCHES):
        events.append(OnDisk(at=end + 3, lane=LANE, index=number + 1, digest=digest(number), copies=3))
        events.append(Copies(at=end + 3, who="s", lane=LANE, index=number + 1, copies=3, needed=2))
    return [*events, Ended(at=end + 4)]


def read(reader: str, number: int, at: int) -> Delivered:
    """A reader gets batch `number` where it is."""
    return Delivered(at=at, reader=reader, lane=LANE, index=number + 1, seq=number * RECORDS, count=RECORDS, session=0,
                     session_seq=number, partition=0, digest=digest(number), append_us=at, durable=True)  # fmt: skip


def history(events: list[Event]) -> History:
    return History(events)
