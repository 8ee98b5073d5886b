"""Bugs injected into `embarcadero/broker/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import ENDED, ENDS, LOSS, POWER, ROLE, TABLES, TRIMS, Bug
from embarcadero_proof.bugs.patch import Edit

_RELAY: Final = "embarcadero.broker.pending:Relay.poll"
_AWAITING: Final = "embarcadero.broker.durable:AwaitingLane"
_STORED: Final = "embarcadero.broker.lane_reader:StoredLane"
_POSITIONS: Final = "embarcadero.broker.positions:Positions"

BUGS: Final = (
    Bug("lane-ack-unchecked", "a broker acks batches of its lanes without a check whether it was closed", "P4",
        lanes=True, witnesses=(97,), edits=(
            Edit("embarcadero.broker.own_lanes:OwnLanes._settle", "still_open():", "still_open() and False:"),)),
    Bug("lane-frontier-before-entries", "a lane's frontier moves before its entries are flushed", ROLE,
        lanes=True, bias=ENDS, witnesses=(37,), edits=(
            Edit("embarcadero.broker.own_lanes:LaneWriter.stage", "        self.next_seq += header.count\n",
                 "        self.next_seq += header.count\n        self._ring.frontier.advance(index + 1)\n"),)),
    Bug("earliest-too-late", "a reader that asks for the earliest index begins one after it", "P4", witnesses=(26, 1),
        edits=(Edit("embarcadero.broker.lane_reader:LaneReader._index_of",
                    "first = self._first_retained(ring, ordered, now_us)",
                    "first = min(self._first_retained(ring, ordered, now_us) + 1, bound)"),)),
    Bug("ack-before-durable", "a broker acks ordered batches as durable", "P6", bias=POWER, witnesses=(0,),
        edits=(Edit(f"{_AWAITING}.hold", '_STORED[acks["outcome"]]', 'np.zeros(len(acks), dtype=bool)'),
               Edit(f"{_AWAITING}.hold_one", "and not peer.gone", "and False"))),
    Bug("serve-above-durable", "a broker serves ordered batches as durable", "P6", bias=POWER, witnesses=(0,),
        edits=(Edit(f"{_STORED}.bound", 'if read == "ordered":', "if True:"),)),
    Bug("lost-gap-from-reader", "a LOST gap begins at the reader's position, though records that it read are lost",
        "P1", bias=LOSS, witnesses=(1,), edits=(
            Edit("embarcadero.broker.durable:LaneRanges.lost_at", "start = before[0].end", "start = index"),)),
    Bug("end-above-loss", "a reader at the end of a broker's lane does not learn of its losses", "P1",
        lanes=True, bias=ENDED, witnesses=(46,), edits=(
            Edit("embarcadero.broker.lane_reader:BrokerLaneReader._kept", 'if read != "ordered" or end == 0:',
                 "if True:"),)),
    Bug("lost-called-never-durable", "a reader of ordered records gets a NEVER_DURABLE gap for lost ones",
        "P1", bias=LOSS, witnesses=(0,), edits=(
            Edit(f"{_STORED}.kind_for", 'ask.read == "durable" and ask.never_durable', "ask.never_durable"),)),
    Bug("start-unsearched", "a broker takes memory as a lane's start before it has searched the files", "P4",
        bias=LOSS, witnesses=(80_020, 80_027, 80_046), edits=(
            Edit(f"{_POSITIONS}._start_above", "if not segments.reach(", "if False and not segments.reach("),
            Edit(f"{_POSITIONS}._check_unchanged", "if stored.chain", "if False and stored.chain"))),
    Bug("trimmed-gap-too-long", "a broker reports one index too many as trimmed", "P1", bias=TRIMS,
        witnesses=(7, 2), edits=(
            Edit(f"{_STORED}.where", "if index < start:\n", "if index < start:\n            start += 1\n"),)),
    Bug("table-frontier-too-high", "a broker continues one index too high after a table", "P4",
        bias=TABLES, witnesses=(0,), edits=(
            Edit("embarcadero.broker.fetches:Fetches._table_read",
                 "result.tail_index = max(result.tail_index, tail)\n",
                 "result.tail_index = max(result.tail_index, tail)\n                result.next_index += 1\n"),)),
    Bug("filter-left-out", "a broker serves all partitions, not only the requested ones", "P4", witnesses=(6, 15),
        edits=(Edit("embarcadero.broker.disk_reads:wanted_entries", "if ask.partitions is not None:", "if False:"),)),
    Bug("tail-too-low", "a broker reports the durable end as the ordered one", "P4", bias=POWER, witnesses=(1,),
        edits=(Edit(f"{_POSITIONS}.tail", " index=ends.index,", " index=ends.durable_index,"),)),
    Bug("reference-unchecked", "a broker does not compare a staged batch with its reference", "P2",
        witnesses=(170_015, 170_000), edits=(
            Edit("embarcadero.broker.references:_judged", "    seen = tuple(",
                 "    if len(payload) == header.length:\n        return payload\n    seen = tuple("),)),
    Bug("reference-not-durable", "a broker publishes by reference before the batch is durable", "P6", bias=POWER,
        witnesses=(170_002, 170_003), edits=(
            Edit("embarcadero.broker.references:References._look", 'read="durable"', 'read="ordered"'),)),
    Bug("connections-left", "a broker keeps closed connections", "P9", witnesses=(1, 0),
        edits=(Edit("embarcadero.broker.broker:Broker._disconnected", "self.peers.pop(peer.number, None)", "pass"),)),
    Bug("epoch-checked-first", "a broker loads epoch lines before results", scope="ack",
        edits=(Edit(_RELAY, "        frontier = results.frontier.load()",
                    "        checked = epoch.may_act()\n        frontier = results.frontier.load()"),
               Edit(_RELAY, "if frontier == self._next + 1 and", "if frontier == self._next + 1 and not checked and"),
               Edit(_RELAY, "or not epoch.may_act()", "or not (checked or epoch.may_act())"))),
    Bug("epoch-not-checked", "a broker acts on results without a check of epoch lines", scope="ack",
        edits=(Edit("embarcadero.fabric.leader:LeaderView.may_act", "not self.table.superseded(self.number)",
                    "(self._member is not None or not self.table.superseded(self.number))"),)),
)  # fmt: skip
