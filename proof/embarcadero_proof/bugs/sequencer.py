"""Bugs injected into `embarcadero/sequencer/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import CRASHES, HOLDERS, LOSS, MOVES, ROLE, SEALS, SLOW, STRIKES, WIPES, Bug
from embarcadero_proof.bugs.patch import Edit

_ORDER: Final = "embarcadero.sequencer.order.batches:LaneOrder"
_LANE: Final = "embarcadero.sequencer.order.lane:Lane"
_CHECKPOINT: Final = "embarcadero.sequencer.order.checkpoint:"
_RANGES: Final = "embarcadero.sequencer.ranges.keeper:RangeKeeper"
_RECOVERY: Final = "embarcadero.sequencer.ranges.recovery:LaneRecovery"
_TAKEOVER: Final = "embarcadero.sequencer.leader.takeover:"
_STATE: Final = f"{_TAKEOVER}PredecessorState"
_CONTROL: Final = "embarcadero.sequencer.order.lane:"
_BROKERS: Final = "embarcadero.sequencer.leader.brokers:"
_LEADERSHIP: Final = "embarcadero.sequencer.leader.leadership:"
_SEQUENCER: Final = "embarcadero.sequencer.leader.sequencer:"
_CAPACITY: Final = "embarcadero.sequencer.order.lane:LaneCapacity"
_ORDER_AGAIN: Final = """\
        if chosen is not None:
            again = is_open & (table.windows.tag.take(step.slots[: step.came]) == step.seqs[: step.came] + 1)
            again &= step.seqs[: step.came] < table.expected.take(step.rows[: step.came])
            chosen = np.concatenate([chosen, np.setdiff1d(again.nonzero()[0], chosen)])
        self._append(step, chosen)
"""

_SLOTS_EARLY: Final = """\
        if count > 0:
            self._read_through.advance(published)
            count = -(-count // 2)
        return max(0, count)
"""
_FRONTIER_EARLY: Final = """\
            self._ring.frontier.advance(self._ring.next + len(part))
            self._ring.write(part, self.free_below)
"""
_NOT_REISSUED: Final = "        self._ring.next = self.order.next_index\n        if False:"
_SEAL_HIGH: Final = "        end = lane_range.ordered()\n        lane_range.count(end)\n"
_LINES: Final = "        end = durable_through(lane_range.range_, self.lines.load(lane_range.range_))\n"
_LINES_FIRST: Final = f"{_LINES}        self.publish("
_SEAL_PLAINLY: Final = """\
        if refs:
            return recovery.directory.ranges.seal_and_open(*ended)
        return recovery."""
_SILENCE_COUNTS: Final = """\
            if table is not None and line is None and member.replica in {ref.replica for ref in range_.replicas}:
                line = range_.start
            elif member.disk not in disks:
"""
_SAYS_MORE: Final = """\
    stored |= np.roll(stored, 1, axis=1) & ~order.table.strong[rows][:, None]
    order.table.windows.restore("""
_STOP_ALL: Final = "        if self._buffer.used:\n            return []\n        for source in"
_OPEN_LATE: Final = "        leader.epochs.open(leader.epoch)\n        if not self._directory.elections.start_epoch("
_ANSWER_FIRST: Final = """\
        early = [answer for lane in self._lanes.by_number.values() for answer in lane.order.out.take_answers()]
        for source in self._brokers.answer(early):
            source.publish()
        written = ["""
_MARKS_LAST: Final = """\
        for handle, progress in self.brokers.items():
            progress.start = FrontierReader(frontiers, frontier_offset(SequencerLine.BROKERS + handle)).load()
        steps.at(Step.TAKEOVER_ANSWERS_READ)
"""

BUGS: Final = (
    Bug(
        "slot-reused-early",
        "pending slots are freed before their entries are safe",
        "P9",
        witnesses=(14,),
        edits=(Edit(f"{_BROKERS}PendingSource.offer", "        return max(0, count)\n", _SLOTS_EARLY),),
    ),
    Bug(
        "frontier-before-entries",
        "the ordered frontier moves before the entries are flushed",
        ROLE,
        bias=CRASHES,
        witnesses=(8,),
        edits=(Edit(f"{_LANE}.write", "            self._ring.write(part, self.free_below)\n", _FRONTIER_EARLY),),
    ),
    Bug(
        "dedupe-off",
        "a sequence seen before is ordered again",
        "P2",
        witnesses=(2,),
        edits=(Edit(f"{_ORDER}.order", "        self._append(step, chosen)\n", _ORDER_AGAIN),),
    ),
    Bug(
        "laps-forgotten",
        "a checkpoint restores a session's window without its wrap-around",
        "P2",
        witnesses=(70_246, 70_065),
        edits=(
            Edit(
                f"{_CHECKPOINT}_window_seqs",
                "return seqs",
                "return np.where(sessions.strong[rows][:, None], seqs, seqs & (W - 1))",
            ),
        ),
    ),
    Bug(
        "held-forgotten",
        "batches in the reorder buffer are lost when their gap closes",
        "P3",
        witnesses=(90, 0),
        edits=(Edit(f"{_ORDER}._sorted_prefixes", "return chosen,", "return chosen[chosen < step.came],"),),
    ),
    Bug(
        "strong-forgotten-in-checkpoint",
        "a restored checkpoint treats strong sessions of order 2 as weak",
        "P3",
        bias=CRASHES,
        witnesses=(90_000,),
        edits=(Edit(f"{_CHECKPOINT}restore", ' | (saved["strong"] != 0)', ""),),
    ),
    Bug(
        "strong-forgotten-at-replay",
        "a takeover treats strong sessions of order 2 as weak",
        "P3",
        bias=CRASHES,
        witnesses=(90_000,),
        edits=(Edit(f"{_CHECKPOINT}_replay_control", "order.all_strong or strong", "order.all_strong"),),
    ),
    Bug(
        "weak-held",
        "a weak session's batch waits for a gap to close",
        "P9",
        witnesses=(90_004,),
        edits=(Edit(f"{_ORDER}._choose", "if every(strong):", "strong.fill(True)\n        if every(strong):"),),
    ),
    Bug(
        "seal-at-frontier",
        "a range is sealed at its ordered end instead of its durable end",
        "P6",
        bias=SEALS,
        witnesses=(147, 90, 43),
        edits=(Edit(f"{_RANGES}._close", "        lane_range.count(end)\n", _SEAL_HIGH),),
    ),
    Bug(
        "failover-statistic",
        "after a loss of the fabric the end is the smallest reply",
        "P1",
        bias=LOSS,
        witnesses=(1,),
        edits=(Edit(f"{_RECOVERY}._collect", "max(replies", "min(replies"),),
    ),
    Bug(
        "too-few-replies",
        "after a loss of the fabric one reply is enough",
        "P1",
        bias=LOSS,
        witnesses=(6,),
        edits=(Edit(f"{_RECOVERY}._collect", "needed = copies - range_.durable_on + 1", "needed = 1"),),
    ),
    Bug(
        "forgetful-counts",
        "a replica without a line for a range counts as an empty copy",
        "P1",
        bias=WIPES,
        witnesses=(13,),
        edits=(Edit(f"{_RECOVERY}._replies", "            if member.disk not in disks:\n", _SILENCE_COUNTS),),
    ),
    Bug(
        "positions-reused",
        "after a loss of the fabric positions are assigned again",
        "P2",
        bias=LOSS,
        witnesses=(1,),
        edits=(Edit(f"{_RECOVERY}._seal_recovered", "        return recovery.", _SEAL_PLAINLY),),
    ),
    Bug(
        "checkpoint-overstates",
        "a restored checkpoint marks sequences as stored that are not",
        "P1",
        bias=LOSS,
        witnesses=(17, 6),
        edits=(Edit(f"{_CHECKPOINT}_restore_windows", "    order.table.windows.restore(", _SAYS_MORE),),
    ),
    Bug(
        "order-slot-reused-early",
        "order slots are reused before their entries are durable",
        ROLE,
        bias=SLOW,
        witnesses=(43,),
        edits=(Edit(f"{_CAPACITY}._bound", "min(self.durable + self._lap, index)", "index"),),
    ),
    Bug(
        "reissue-left-out",
        "a takeover does not re-issue entries that readers may still ask for",
        "P8",
        bias=CRASHES,
        witnesses=(4,),
        edits=(
            Edit(f"{_LANE}.inherit", "        if len(entries):", _NOT_REISSUED),
            Edit(f"{_LANE}.inherit_more", "        if len(entries):", _NOT_REISSUED),
        ),
    ),
    Bug(
        "held-not-read",
        "a takeover does not read the reorder buffer",
        "P9",
        bias=CRASHES,
        witnesses=(2, 1),
        edits=(
            Edit(
                f"{_STATE}.__init__",
                "read_waiting(fabric, held_region(epoch))",
                "read_waiting(fabric, held_region(epoch))[:0]",
            ),
        ),
    ),
    Bug(
        "foreseen-is-the-end",
        "a takeover orders only the entries that it prefetched before its epoch line was open",
        "P2, P5",
        witnesses=(1019, 1058, 1004),
        edits=(
            Edit(f"{_STATE}.rest", "replay(order, after, now_us)", "replay(order, after := after[:0], now_us)"),
        ),
    ),
    Bug(
        "append-time-goes-back",
        "a sequencer uses its own clock, even if it is behind its predecessor's last time",
        "P3",
        bias=CRASHES,
        witnesses=(2, 1),
        edits=(Edit(f"{_LANE}._begin", "self.order.not_before(wall_us)", "self.order.append_us = wall_us"),),
    ),
    Bug(
        "holder-not-fenced",
        "a process that opens a session again does not fence its last holder",
        "P5",
        bias=HOLDERS,
        witnesses=(12, 7),
        edits=(Edit(f"{_CONTROL}_open", "table.state[earlier] == OPEN:", "False:"),),
    ),
    Bug(
        "end-recorded-low",
        "the store records an end of the order that is one batch too low",
        "P5",
        bias=CRASHES,
        witnesses=(1,),
        edits=(
            Edit(f"{_TAKEOVER}Takeover._start", "lane.order.next_index for", "max(0, lane.order.next_index - 1) for"),
        ),
    ),
    Bug(
        "gap-stops-all",
        "nothing is ordered while the reorder buffer holds a batch",
        "P9",
        witnesses=(105,),
        edits=(Edit(f"{_SEQUENCER}Rounds._offers", "        for source in", _STOP_ALL),),
    ),
    Bug(
        "regions-left",
        "a sequencer does not remove regions of epochs before its predecessor's",
        "P9",
        bias=CRASHES,
        witnesses=(2, 1),
        edits=(Edit(f"{_LEADERSHIP}Sweeper._left", "generation_holds()", "generation_holds() and False"),),
    ),
    Bug(
        "deleted-ring-left",
        "a sequencer keeps the rings of a deleted topic",
        "P9",
        witnesses=(150_000,),
        edits=(
            Edit(f"{_LEADERSHIP}LeaderLanes.drop", "self._leader.fabric.remove(name)", "pass"),
        ),
    ),
    Bug(
        "epoch-opened-late",
        "a takeover reads before it opens its epoch line",
        "P2, P5",
        bias=MOVES,
        witnesses=(160,),
        scope="ack",
        edits=(
            Edit(
                f"{_LEADERSHIP}Leadership.__init__",
                "directory.elections.started_epoch() + 1:",
                "directory.elections.started_epoch() + 1 and False:",
            ),
            Edit(f"{_SEQUENCER}Sequencer.begin", "leader.epochs.open(leader.epoch)", "pass"),
            Edit(f"{_TAKEOVER}Takeover._start", "        if not self._directory.elections.start_epoch(", _OPEN_LATE),
        ),
    ),
    Bug(
        "ordered-end-from-frontier",
        "a takeover treats the frontier as the end of the order",
        scope="ack",
        edits=(
            Edit(
                f"{_TAKEOVER}_read_on",
                "return valid_from(ring, start)",
                "return valid_from(ring, start)[: max(0, ring.frontier.load() - start)]",
            ),
        ),
    ),
    Bug(
        "results-before-entries",
        "a round answers before its entries are flushed",
        "P2, P5",
        bias=STRIKES,
        witnesses=(0,),
        scope="ack",
        edits=(Edit(f"{_SEQUENCER}Rounds._write", "        written = [", _ANSWER_FIRST),),
    ),
    Bug(
        "answers-not-repeated",
        "a takeover does not repeat answers that were not read yet",
        scope="answers",
        edits=(Edit(f"{_STATE}._read_broker", "ring.read(start, end)", "ring.read(start, start)"),),
    ),
    Bug(
        "takeover-reads-forwards",
        "a takeover reads the read-through watermarks after the results",
        scope="answers, one host",
        edits=(Edit(f"{_STATE}.__init__", "        steps.at(Step.TAKEOVER_ANSWERS_READ)\n", _MARKS_LAST),),
    ),
    Bug(
        "closing-not-fenced",
        "a sealer reads durable lines without a fence after its closing word",
        scope="seal, one host",
        edits=(Edit(f"{_RANGES}.publish", "self._fabric.fence()", "pass"),),
    ),
    Bug(
        "closing-said-late",
        "a sealer reads durable lines before it writes closing",
        scope="seal, one host",
        edits=(
            Edit(f"{_RANGES}._close", _LINES, ""),
            Edit(f"{_RANGES}._close", "        self.publish(", _LINES_FIRST),
        ),
    ),
    Bug(
        "handles-reused",
        "after a loss of the fabric handles of sessions are assigned again",
        test="tests/sequencer/test_recovery.py",
        edits=(
            Edit(f"{_RECOVERY}._begin", "order.table.pass_over(handles)", "pass"),
            Edit(f"{_CONTROL}_open", "if handle >= table.handles_reserved:", "if False:"),
        ),
    ),
    Bug(
        "ceiling-ignored",
        "positions are assigned that the store has not reserved",
        test="tests/sequencer/test_room.py",
        edits=(Edit(f"{_CAPACITY}._bound", "self.ceiling", "((1 << 64) - 1, (1 << 64) - 1)"),),
    ),
)
