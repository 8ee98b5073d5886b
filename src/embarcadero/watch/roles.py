"""Roles as the endpoint sees them: what they count, and whether they can do their work."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from embarcadero.broker.broker import Broker
from embarcadero.broker.counters import Traffic
from embarcadero.env import Clock
from embarcadero.limits import HEARTBEAT_S, SILENT_S
from embarcadero.replica.replica import Replica
from embarcadero.sequencer.leader.sequencer import Sequencer
from embarcadero.sequencer.order.batches import FenceReason
from embarcadero.sequencer.order.lane import Lane
from embarcadero.sequencer.order.sessions import FENCED, NEVER, OPEN
from embarcadero.types import Outcome, Trouble, health_in_words
from embarcadero.watch.metrics import Page

_US: Final = 1e-6
_PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")
_STARTED_S: Final = time.time()


class WatchedRole(Protocol):
    """A role of this process."""

    @property
    def name(self) -> str:
        """What it is called now."""
        ...

    def write(self, page: Page) -> None:
        """Put its metrics on the page."""
        ...

    async def unready(self) -> str:
        """Why it cannot do its work now; empty when it can."""
        ...


def write_process(page: Page) -> None:
    """Facts about this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    page.put("process_cpu_seconds_total", used.ru_utime + used.ru_stime)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    page.put("process_resident_memory_bytes", pages * _PAGE_BYTES)
    page.put("process_open_fds", len(os.listdir("/proc/self/fd")))
    page.put("process_start_time_seconds", round(_STARTED_S))


class WatchedBroker:
    """One broker incarnation."""

    def __init__(self, broker: Broker) -> None:
        self._broker, self.name = broker, broker.member.region_prefix

    async def unready(self) -> str:
        """A broker is ready while it is a member and a sequencer's heart beats: we wait for the next beat."""
        broker, give_up = self._broker, time.monotonic() + SILENT_S
        first = broker.epoch.heartbeat()
        while True:
            if broker.deposed or broker.leaving:
                return "leaving" if broker.leaving else "another incarnation has its place"
            if broker.epoch.number == 0:
                return "no sequencer has started an epoch yet"
            if broker.epoch.heartbeat() != first:
                return ""
            if time.monotonic() > give_up:
                return f"the sequencer of epoch {first[0]} has been silent for {SILENT_S:g} s"
            await asyncio.sleep(HEARTBEAT_S / 4)

    def write(self, page: Page) -> None:
        """Everything of a broker."""
        broker, counters, ingest = self._broker, self._broker.counters, self._broker.ingest
        number = broker.member.broker
        self._write_traffic(page, "publish", counters.came_in)
        self._write_traffic(page, "subscribe", counters.went_out)
        page.histogram("embarcadero_publish_latency_seconds", counters.publish_us, _US, broker=number)
        page.histogram("embarcadero_e2e_latency_seconds", counters.delivery_us, _US, broker=number)
        for outcome in Outcome:
            page.put("embarcadero_outcomes_total", counters.outcomes[int(outcome)], broker=number, outcome=outcome.name)
        again = counters.outcomes[int(Outcome.DUP_OF)] + counters.outcomes[int(Outcome.DUP)]
        page.put("embarcadero_duplicates_rejected_total", again, broker=number)
        page.put("embarcadero_connections", len(broker.peers), broker=number)
        page.put("embarcadero_connections_total", counters.connections, broker=number)
        for error, count in (counters.hung_up or {"ProtocolError": 0}).items():
            page.put("embarcadero_connections_ended_total", count, broker=number, error=error)
        page.put("embarcadero_pending_entries", ingest.next - ingest.free_below, broker=number)
        page.put("embarcadero_pending_slots", broker.ingest.slots, broker=number)
        page.put("embarcadero_unresolved_entries", broker.unsettled, broker=number)
        page.put("embarcadero_published_index", ingest.next, broker=number)
        page.put("embarcadero_read_through_index", broker.epoch.read_through(), broker=number)
        page.put("embarcadero_log_occupancy_ratio", ingest.log.occupied(), broker=number)
        page.put("embarcadero_credit_bytes", broker.credit_bytes(), broker=number)
        page.put("embarcadero_backpressure", int(broker.full), broker=number)
        page.put("embarcadero_backpressure_total", counters.backpressure, broker=number)
        page.put("embarcadero_fetches_waiting", broker.fetches_waiting, broker=number)
        page.put("embarcadero_unread_bytes", broker.unread.used, broker=number)
        page.put("embarcadero_unread_connections", broker.unread.holders, broker=number)
        page.put("embarcadero_unread_waits_total", broker.unread.waits, broker=number)
        page.put("embarcadero_references_copied_total", broker.admission.references.copied, broker=number)
        page.put("embarcadero_references_waiting", broker.admission.references.waiting, broker=number)
        page.put("embarcadero_followed_epoch", broker.epoch.number, broker=number)
        self._write_disks(page)
        for lane, (index, seq) in broker.lanes.frontiers().items():
            topic = broker.store.topic_name(lane) or lane
            page.put("embarcadero_lane_index", index, broker=number, topic=topic)
            page.put("embarcadero_lane_seq", seq, broker=number, topic=topic)
        for lane, lags in broker.reader_lags().items():
            topic = broker.store.topic_name(lane) or lane
            page.put("embarcadero_readers", len(lags), broker=number, topic=topic)
            page.put("embarcadero_reader_lag_batches", max(lags), broker=number, topic=topic)

    def _write_disks(self, page: Page) -> None:
        """What waits for disks, and what is read from them."""
        broker, number = self._broker, self._broker.member.broker
        awaiting, disks = broker.awaiting, broker.readers.disks
        page.put("embarcadero_acks_waiting_for_disks", awaiting.waiting, broker=number)
        kept = awaiting.kept_chunks / broker.ingest.log.chunks
        page.put("embarcadero_log_kept_for_disks_ratio", kept, broker=number)
        for lane, (through, _) in awaiting.facts().items():
            page.put("embarcadero_durable_index", through, broker=number, lane=lane)
            if (tiered := broker.readers.tiered(lane)) is not None:
                behind = broker.durable.chain(lane).batches(tiered, through)
                page.put("embarcadero_tier_lag_batches", behind, broker=number, lane=lane)
        page.put("embarcadero_warm_reads", disks.running + disks.waiting, broker=number)
        page.put("embarcadero_warm_reads_total", disks.jobs, broker=number)
        page.put("embarcadero_warm_reads_ahead_total", disks.ahead_used, broker=number)

    def _write_traffic(self, page: Page, way: str, traffic: dict[int, Traffic]) -> None:
        for lane, found in traffic.items():
            labels = {"broker": self._broker.member.broker, "topic": self._broker.store.topic_name(lane) or lane}
            page.put(f"embarcadero_{way}_bytes_total", found.bytes, **labels)
            page.put(f"embarcadero_{way}_batches_total", found.batches, **labels)
            page.put(f"embarcadero_{way}_records_total", found.records, **labels)


class WatchedSequencer:
    """The sequencer of an epoch."""

    def __init__(self, sequencer: Sequencer, clock: Clock) -> None:
        self.sequencer, self._clock, self.name = sequencer, clock, f"sequencer-{sequencer.epoch}"

    async def unready(self) -> str:
        """A sequencer is ready from the start of its epoch to that of the next."""
        return "another sequencer has taken over" if self.sequencer.deposed else ""

    def write(self, page: Page) -> None:
        """Everything of a sequencer."""
        sequencer, counters = self.sequencer, self.sequencer.counters
        orders = [lane.order for lane in sequencer.lanes.values()]
        page.put("embarcadero_epoch", sequencer.epoch)
        page.put("embarcadero_epoch_increments_total", sequencer.epoch)
        page.put("embarcadero_sequencer_failovers_total", sequencer.epoch - 1)
        page.put("embarcadero_broker_failures_total", counters.brokers_closed)
        page.put("embarcadero_rounds_total", counters.rounds)
        page.put("embarcadero_entries_total", counters.entries)
        page.histogram("embarcadero_round_entries", counters.round_entries)
        page.histogram("embarcadero_sequencer_latency_seconds", counters.round_us, _US)
        strong = sum(int(np.count_nonzero((o.table.state == OPEN) & o.table.strong)) for o in orders)
        page.put("embarcadero_level5_clients_active", strong)
        page.put("embarcadero_hold_buffer_entries", sequencer.buffer.used)
        page.put("embarcadero_hold_buffer_slots", sequencer.buffer.slots)
        page.put("embarcadero_hold_buffer_timeouts_total", sum(order.counters.gap_timeouts for order in orders))
        page.put("embarcadero_gaps_skipped_total", sum(order.counters.skips for order in orders))
        page.put("embarcadero_ranges_sealed_total", counters.seals)
        page.put("embarcadero_range_seals_failed_total", counters.seals_failed)
        page.put("embarcadero_lanes_recovering", len(sequencer.recovery.lanes))
        page.put("embarcadero_lanes_recovered_total", counters.recovered)
        page.put("embarcadero_recovery_seconds", counters.recovery_us * _US)
        for lane in sequencer.lanes.values():
            self._write_lane(page, lane)

    def _write_lane(self, page: Page, lane: Lane) -> None:
        order, table, counters = lane.order, lane.order.table, lane.order.counters
        topic, now_us = order.topic.name, self._clock.now_us()
        page.put("embarcadero_ordered_index", order.next_index, topic=topic)
        page.put("embarcadero_ordered_seq", order.next_seq, topic=topic)
        for name, state in (("open", OPEN), ("fenced", FENCED)):
            count = int(np.count_nonzero(table.state == state))
            page.put("embarcadero_sessions", count, topic=topic, state=name)
        page.put("embarcadero_sessions_opened_total", counters.opened, topic=topic)
        page.put("embarcadero_sessions_closed_total", counters.closed, topic=topic)
        for why in ("gap", "overflow", "idle", "replaced", "restart"):
            page.put("embarcadero_sessions_fenced_total", counters.fenced[FenceReason(why)], topic=topic, why=why)
        page.put("embarcadero_sequencer_hold_buffer_entries", table.waiting.total, topic=topic)
        oldest = table.waiting.oldest_us
        age_ms = 0 if oldest == NEVER else (now_us - oldest) // 1000
        page.put("embarcadero_sequencer_hold_buffer_age_ms", age_ms, topic=topic)
        page.histogram("embarcadero_sequencer_cascade_release_depth", counters.cascades, topic=topic)
        page.put("embarcadero_sequencer_skip_total", counters.skips, topic=topic, reason="timeout")
        page.put("embarcadero_sequencer_checkpoint_write_duration_us", counters.checkpoint_us, topic=topic)
        age_s = (now_us - counters.checkpoint_at_us) // 1_000_000 if counters.checkpoints else 0
        page.put("embarcadero_sequencer_checkpoint_age_sec", age_s, topic=topic)
        page.put("embarcadero_sequencer_checkpoint_client_count", counters.checkpoint_sessions, topic=topic)
        if lane.capacity is not None:
            page.put("embarcadero_sequencer_durable_index", lane.capacity.durable, topic=topic)
            page.put("embarcadero_sequencer_roomless_total", counters.refused, topic=topic)


# --- candidate --------------------------------------------------------------------------------------------------------
# A sequencer candidate as the endpoint sees it: the sequencer of an epoch, or one that stands by.
class WatchedCandidate:
    """One candidate over all its reigns."""

    def __init__(self, number: int, clock: Clock) -> None:
        self._number, self._clock = number, clock
        self._reign: WatchedSequencer | None = None

    @property
    def sequencer(self) -> Sequencer | None:
        """The sequencer that it is; None while it stands by."""
        return None if self._reign is None else self._reign.sequencer

    @sequencer.setter
    def sequencer(self, sequencer: Sequencer | None) -> None:
        self._reign = None if sequencer is None else WatchedSequencer(sequencer, self._clock)

    @property
    def name(self) -> str:
        """`sequencer-<epoch>`, or `standby-<candidate>`."""
        return f"standby-{self._number}" if self._reign is None else self._reign.name

    async def unready(self) -> str:
        """One that stands by is ready for that."""
        return "" if self._reign is None else await self._reign.unready()

    def write(self, page: Page) -> None:
        """Whether it stands by; everything of a sequencer if it is one."""
        page.put("embarcadero_sequencer_standby", int(self._reign is None), candidate=self._number)
        if self._reign is not None:
            self._reign.write(page)


# --- replica ----------------------------------------------------------------------------------------------------------
# A replica as the endpoint sees it: what it counts, how far its lanes are behind, and whether it can do its work.


class WatchedReplica:
    """One replica incarnation."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self.name = replica, replica.member.ref.region_prefix

    async def unready(self) -> str:
        """A replica is ready while it has its place and its disk takes what is written."""
        replica = self._replica
        if replica.deposed:
            return "another incarnation has its place"
        if replica.health.trouble & ~Trouble.DAMAGED:
            return f"{'; '.join(health_in_words(replica.health.trouble))} ({replica.health.reason})"
        return ""

    def write(self, page: Page) -> None:
        """Everything of a replica."""
        replica, counters = self._replica, self._replica.counters
        number = replica.member.replica
        page.put("embarcadero_replica_entries_total", counters.entries, replica=number)
        page.put("embarcadero_replica_bytes_total", counters.bytes, replica=number)
        page.put("embarcadero_replica_commits_total", counters.commits, replica=number)
        page.histogram("embarcadero_replica_commit_entries", counters.commit_entries, replica=number)
        page.histogram("embarcadero_replica_fsync_latency_seconds", counters.sync_us, _US, replica=number)
        page.put("embarcadero_replica_repaired_entries_total", counters.repaired_entries, replica=number)
        page.put("embarcadero_replica_repaired_bytes_total", counters.repaired_bytes, replica=number)
        page.put("embarcadero_replica_damage_total", counters.damage_found, replica=number)
        page.put("embarcadero_replica_disk_errors_total", counters.disk_errors, replica=number)
        page.put("embarcadero_replica_checkpoints_total", counters.checkpoints, replica=number)
        page.put("embarcadero_replica_dropped_bytes_total", counters.dropped_bytes, replica=number)
        page.put("embarcadero_replica_scrubbed_bytes_total", counters.scrubbed_bytes, replica=number)
        for trouble in Trouble:
            name = (trouble.name or "").lower()
            page.put(
                "embarcadero_replica_trouble", int(trouble in replica.health.trouble), replica=number, trouble=name
            )
        for state, count in replica.count_ranges().items():
            page.put("embarcadero_replica_ranges", count, replica=number, state=state)
        page.put("embarcadero_replica_disk_bytes", replica.disk_bytes(), replica=number)
        page.put("embarcadero_replica_disk_free_bytes", replica.free_bytes(), replica=number)
        for lane, lag in replica.lags().items():
            topic = replica.topics[lane].name if lane in replica.topics else lane
            page.put("embarcadero_replication_lag_batches", lag, replica=number, topic=topic, lane=lane)
