"""Bugs injected into `embarcadero/broker/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import ENDED, ENDS, LOSS, POWER, ROLE, TABLES, TRIMS, Bug

BUGS: Final = (
    Bug("lane-ack-unchecked", "a broker acks batches of its lanes without looking whether it was closed", "P4",
              lanes=True, witnesses=(97,)),
    Bug("lane-frontier-before-entries", "a lane's frontier moves before its entries are flushed", ROLE,
              lanes=True, bias=ENDS, witnesses=(37,)),
    Bug("earliest-too-late", "a reader that asks for the earliest begins one behind it", "P4",
              witnesses=(26, 1)),
    Bug("ack-before-durable", "a broker acks as durable what is only ordered", "P6", bias=POWER, witnesses=(0,)),
    Bug("serve-above-durable", "a broker serves as durable what is only ordered", "P6", bias=POWER,
              witnesses=(0,)),
    Bug("lost-gap-from-reader", "a LOST gap begins where the reader is, though what it read before is lost",
              "P1", bias=LOSS, witnesses=(1,)),
    Bug("end-above-loss", "a reader at the end of a broker's lane does not hear what of it is lost", "P1",
              lanes=True, bias=ENDED, witnesses=(46,)),
    Bug("lost-called-never-durable", "a reader of what is ordered hears that nothing which it read is lost",
              "P1", bias=LOSS, witnesses=(0,)),
    Bug("start-unsearched", "a broker takes memory for the start of a lane whose files it has not searched", "P4",
              bias=LOSS, witnesses=(80_020, 80_027, 80_046)),
    Bug("trimmed-gap-too-long", "a broker tells one index more than there are as trimmed", "P1", bias=TRIMS,
              witnesses=(7, 2)),
    Bug("table-frontier-too-high", "a broker goes on one index behind what it read in a table", "P4",
              bias=TABLES, witnesses=(0,)),
    Bug("filter-left-out", "a broker serves all partitions, whatever was asked for", "P4", witnesses=(6, 15)),
    Bug("tail-too-low", "a broker tells the durable end for the ordered one", "P4", bias=POWER, witnesses=(1,)),
    Bug("reference-unchecked", "a broker does not compare a staged batch with what its reference says", "P2",
              witnesses=(170_015, 170_000)),
    Bug("reference-not-durable", "a broker publishes by reference what is only ordered", "P6", bias=POWER,
              witnesses=(170_002, 170_003)),
    Bug("connections-left", "a broker does not forget connections that are gone", "P9", witnesses=(1, 0)),
    Bug("epoch-checked-first", "a broker looks at epoch lines first, and loads results then", scope="ack"),
    Bug("epoch-not-checked", "a broker acts on results without looking at epoch lines", scope="ack"),
)  # fmt: skip
