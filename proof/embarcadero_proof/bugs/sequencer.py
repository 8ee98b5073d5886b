"""Bugs injected into `embarcadero/sequencer/`."""

from __future__ import annotations

from typing import Final

from embarcadero_proof.bugs.bug import HOLDERS, LOSS, MOVES, REIGNS, ROLE, SEALS, SLOW, STRIKES, WIPES, Bug
from embarcadero_proof.bugs.patch import Edit

_ORDER: Final = "embarcadero.sequencer.order:LaneOrder"
_ORDER_AGAIN: Final = """\
        if chosen is not None:
            again = is_open & (table.tag.take(step.slots[: step.came]) == step.seqs[: step.came] + 1)
            again &= step.seqs[: step.came] < table.expected.take(step.rows[: step.came])
            chosen = np.concatenate([chosen, np.setdiff1d(again.nonzero()[0], chosen)])
        self._append(step, chosen)
"""

BUGS: Final = (
    Bug("slot-reused-early", "pending slots are freed before what they hold is safe", "P9", witnesses=(14,)),
    Bug("frontier-before-entries", "the ordered frontier moves before the entries are flushed", ROLE,
              bias=REIGNS, witnesses=(8,)),
    Bug("dedupe-off", "a sequence seen before is ordered again", "P2", witnesses=(2,),
        edits=(Edit(f"{_ORDER}.order", "        self._append(step, chosen)\n", _ORDER_AGAIN),)),
    Bug("laps-forgotten", "a checkpoint takes a session's window for one that has not gone round yet", "P2",
              witnesses=(70_246, 70_065)),
    Bug("held-forgotten", "batches that wait for a gap are lost when it closes", "P3", witnesses=(90, 0),
        edits=(Edit(f"{_ORDER}._sorted_prefixes", "return chosen,", "return chosen[chosen < step.came],"),)),
    Bug("strong-forgotten-in-checkpoint", "a restored checkpoint takes strong sessions of order 2 for weak ones",
              "P3", bias=REIGNS, witnesses=(90_000,)),
    Bug("strong-forgotten-at-replay", "a takeover takes strong sessions of order 2 for weak ones", "P3",
              bias=REIGNS, witnesses=(90_000,)),
    Bug("weak-held", "a weak session's batch waits behind a gap", "P9", witnesses=(90_004,),
        edits=(Edit(f"{_ORDER}._choose", "if every(strong):", "strong.fill(True)\n        if every(strong):"),)),
    Bug("seal-at-frontier", "a range is sealed at what is ordered, not at what is durable", "P6", bias=SEALS,
              witnesses=(147, 90, 43)),
    Bug("failover-statistic", "after a loss of the fabric the smallest reply is the end", "P1", bias=LOSS,
              witnesses=(1,)),
    Bug("too-few-replies", "after a loss of the fabric one reply is enough", "P1", bias=LOSS, witnesses=(6,)),
    Bug("forgetful-counts", "a replica that says nothing of a range is taken for one with an empty copy", "P1",
              bias=WIPES, witnesses=(13,)),
    Bug("positions-reused", "after a loss of the fabric positions are handed out again", "P2", bias=LOSS,
              witnesses=(1,)),
    Bug("checkpoint-says-more", "a restored checkpoint calls more sequences stored than are", "P1",
              bias=LOSS, witnesses=(17, 6)),
    Bug("order-slot-reused-early", "order slots are reused before they are durable", ROLE, bias=SLOW,
              witnesses=(43,)),
    Bug("reissue-left-out", "a takeover does not issue again what readers may still ask for", "P8", bias=REIGNS,
              witnesses=(4,)),
    Bug("held-not-read", "a takeover forgets batches that wait for a gap to close", "P9", bias=REIGNS,
              witnesses=(2, 1)),
    Bug("foreseen-is-the-end", "a takeover takes what it read before its epoch line was open for all there is",
              "P2, P5", witnesses=(1019, 1058, 1004)),
    Bug("append-time-goes-back", "a sequencer believes its own clock, whatever its predecessor wrote", "P3",
              bias=REIGNS, witnesses=(2, 1)),
    Bug("holder-not-fenced", "who opens a session again does not end the one who had it", "P5", bias=HOLDERS,
              witnesses=(12, 7)),
    Bug("end-recorded-low", "the store is told that the order ended one batch earlier", "P5", bias=REIGNS,
              witnesses=(1,)),
    Bug("gap-stops-all", "nothing is ordered while a batch waits for its gap to close", "P9", witnesses=(105,)),
    Bug("regions-left", "a sequencer does not remove what epochs before its predecessor left", "P9", bias=REIGNS,
              witnesses=(2, 1)),
    Bug("deleted-ring-left", "a sequencer keeps the rings of a deleted topic", "P9", witnesses=(150_000,)),
    Bug("epoch-opened-late", "a takeover reads first, and opens its epoch line then", "P2, P5", bias=MOVES,
              witnesses=(160,), scope="ack"),
    Bug("ordered-end-from-frontier", "a takeover takes the frontier for the end of the order", scope="ack"),
    Bug("results-before-entries", "a round answers before its entries are flushed", "P2, P5", bias=STRIKES,
              witnesses=(0,), scope="ack"),
    Bug("answers-not-repeated", "a takeover does not repeat answers that were not read yet", scope="answers"),
    Bug("takeover-reads-forwards", "a takeover reads how far pending rings were read after what was answered",
              scope="answers, one host"),
    Bug("closing-not-fenced", "a sealer reads durable lines without a fence after its closing word",
              scope="seal, one host"),
    Bug("closing-said-late", "a sealer reads durable lines first, and says closing then", scope="seal, one host"),
)  # fmt: skip
