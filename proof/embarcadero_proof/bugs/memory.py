"""Memory primitives that a role omits."""

from __future__ import annotations

from typing import Final

from embarcadero.fabric.layout import SLOTS_OFFSET, BrokerLine, frontier_offset
from embarcadero_proof.bugs.bug import ROLE, Bug
from embarcadero_proof.bugs.leaks import Leak

BUGS: Final = (
    Bug("missing-flush", "the sequencer does not flush order entries", ROLE,
              Leak("sequencer", "flush", "/order-", SLOTS_OFFSET), witnesses=(151,)),
    Bug("missing-flush-results", "the sequencer does not flush results", "P8",
              Leak("sequencer", "flush", "/results-", SLOTS_OFFSET), witnesses=(90, 0)),
    Bug("missing-flush-pending", "brokers do not flush pending entries", ROLE,
              Leak("broker", "flush", "/pending", SLOTS_OFFSET), witnesses=(0,)),
    Bug("missing-flush-payload", "brokers do not flush payloads", "P4",
              Leak("broker", "flush", "/log"), witnesses=(90,)),
    Bug("missing-invalidate", "brokers read order entries from their cache", "P8",
              Leak("broker", "invalidate", "/order-", SLOTS_OFFSET), witnesses=(135,)),
    Bug("missing-invalidate-payload", "brokers read payloads from their cache", "P4",
              Leak("broker", "invalidate", "/log"), witnesses=(90,)),
    Bug("missing-invalidate-pending", "the sequencer reads pending entries from its cache", ROLE,
              Leak("sequencer", "invalidate", "/pending", SLOTS_OFFSET), witnesses=(0,)),
    Bug("missing-flush-held", "the sequencer does not flush its reorder buffer", "P9",
              Leak("sequencer", "flush", "/held"), witnesses=(103,)),
    Bug("missing-flush-checkpoint", "the sequencer does not flush checkpoints", ROLE,
              Leak("sequencer", "flush", "/checkpoint-"), witnesses=(4,)),
    Bug("missing-flush-freed", "brokers do not flush the line of a freed chunk", "P4",
              Leak("broker", "flush", "/frontiers", frontier_offset(BrokerLine.CHUNKS)), witnesses=(90,)),
    Bug("missing-flush-lane", "brokers do not flush entries of their lanes", ROLE,
              Leak("broker", "flush", "/order-", SLOTS_OFFSET), lanes=True, witnesses=(135,)),
)  # fmt: skip
