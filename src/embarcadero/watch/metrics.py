"""All metrics in one table; the metrics page of a process; the samples and the readiness of each role.

docs/metrics.md is generated from the table. It also maps the metrics of the first design to the current ones.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import resource
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from embarcadero.env import Histogram
from embarcadero.errors import invariant
from embarcadero.limits import HEARTBEAT_S, SILENT_S
from embarcadero.sequencer.order.batches import FenceReason
from embarcadero.sequencer.order.sessions import FENCED, NEVER, OPEN
from embarcadero.types import Outcome, Trouble, health_in_words

if TYPE_CHECKING:
    from embarcadero.broker.broker import Broker
    from embarcadero.broker.context import Traffic
    from embarcadero.env import Clock
    from embarcadero.replica.replica import Replica
    from embarcadero.sequencer.leader.sequencer import Sequencer
    from embarcadero.sequencer.order.lane import Lane


class Metric(NamedTuple):
    """One metric: a counter only grows, a gauge is a current value, a histogram counts observations by size."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def _table(text: str) -> tuple[Metric, ...]:
    """Parse metrics, one for each line: kind, name with labels, help text."""
    rows = re.findall(r"^(\w+) (\w+)(?:\{([\w,]+)\})?: (.+)$", text, re.MULTILINE)
    return tuple(Metric(name, kind, tuple(filter(None, labels.split(","))), what) for kind, name, labels, what in rows)


NODE: Final = _table("""
gauge embarcadero_up{role,version}: 1 for every role of this process
counter process_cpu_seconds_total: processor time of this process, user and system
gauge process_resident_memory_bytes: resident memory of this process, including its mapped part of the fabric
gauge process_open_fds: open files and sockets of this process
gauge process_start_time_seconds: start time of this process, in seconds since 1970
""")

BROKER: Final = _table("""
counter embarcadero_publish_bytes_total{broker,topic}: payload bytes of received batches
counter embarcadero_publish_batches_total{broker,topic}: received batches
counter embarcadero_publish_records_total{broker,topic}: records of received batches
counter embarcadero_subscribe_bytes_total{broker,topic}: payload bytes served to readers
counter embarcadero_subscribe_batches_total{broker,topic}: batches served to readers
counter embarcadero_subscribe_records_total{broker,topic}: records served to readers
histogram embarcadero_publish_latency_seconds{broker}: from the complete receipt of a batch to its outcome
histogram embarcadero_e2e_latency_seconds{broker}: from the append time to the answer of a waiting read
counter embarcadero_outcomes_total{broker,outcome}: answers to batches and session requests
counter embarcadero_duplicates_rejected_total{broker}: received batches that were already in the log (DUP_OF, DUP)
gauge embarcadero_connections{broker}: clients connected now
counter embarcadero_connections_total{broker}: clients that have connected since the start
counter embarcadero_connections_ended_total{broker,error}: connections closed by the broker because of the peer's error
gauge embarcadero_pending_entries{broker}: pending entries that the sequencer has not taken
gauge embarcadero_pending_slots{broker}: capacity for pending entries
gauge embarcadero_unresolved_entries{broker}: entries without an outcome
gauge embarcadero_published_index{broker}: frontier: pending entries below are published
gauge embarcadero_read_through_index{broker}: frontier: pending entries below were taken by the sequencer
gauge embarcadero_log_occupancy_ratio{broker}: share of the broker log that unresolved payloads occupy
gauge embarcadero_credit_bytes{broker}: bytes that all clients together may send now
gauge embarcadero_backpressure{broker}: 1 while the broker grants no credit
counter embarcadero_backpressure_total{broker}: times that the broker stopped granting credit
gauge embarcadero_fetches_waiting{broker}: reads that wait for records
gauge embarcadero_unread_bytes{broker}: memory of answers not yet read by clients, and of reads from files and tables
gauge embarcadero_unread_connections{broker}: connections with such answers
counter embarcadero_unread_waits_total{broker}: times that a read had to wait for the memory of answers
counter embarcadero_references_copied_total{broker}: batches by reference whose staged bytes were copied
gauge embarcadero_references_waiting{broker}: batches that wait until a staged batch is read from a file
gauge embarcadero_acks_waiting_for_disks{broker}: acks (ack=2) that wait until their batch is durable
gauge embarcadero_log_kept_for_disks_ratio{broker}: share of the broker log that is kept for replicas
gauge embarcadero_durable_index{broker,lane}: frontier: batches of the lane below are durable, as counted by the broker
gauge embarcadero_tier_lag_batches{broker,lane}: durable batches of the lane that are not in its topic's table yet
gauge embarcadero_warm_reads{broker}: reads of segment files, running or queued
counter embarcadero_warm_reads_total{broker}: reads of segment files
counter embarcadero_warm_reads_ahead_total{broker}: fetches served by read-ahead of a segment file
gauge embarcadero_readers{broker,topic}: connections that read the topic and sent a fetch in the last minute
gauge embarcadero_reader_lag_batches{broker,topic}: lag of the slowest of these readers behind the ordered frontier
gauge embarcadero_lane_index{broker,topic}: orders 0 and 1, frontier of the broker's own lane: batches below are in it
gauge embarcadero_lane_seq{broker,topic}: the same: records below are in it
gauge embarcadero_followed_epoch{broker}: the epoch that the broker follows; 0 before the first
""")

SEQUENCER: Final = _table("""
gauge embarcadero_sequencer_standby{candidate}: 1 while this process stands by, 0 while it leads
gauge embarcadero_epoch: the sequencer's epoch
counter embarcadero_epoch_increments_total: epochs opened since the fabric was created
counter embarcadero_sequencer_failovers_total: epochs opened after the first: each was a takeover
counter embarcadero_broker_failures_total: broker incarnations that this sequencer closed, for any reason
counter embarcadero_rounds_total: rounds, including idle rounds
counter embarcadero_entries_total: pending entries decided on
histogram embarcadero_round_entries: entries of a round, without idle rounds
histogram embarcadero_sequencer_latency_seconds: duration of a round, without idle rounds
gauge embarcadero_ordered_index{topic}: frontier: batches and session entries below are ordered
gauge embarcadero_ordered_seq{topic}: frontier: records below are ordered
gauge embarcadero_sessions{topic,state}: sessions in the table: open, or fenced and kept for some time
counter embarcadero_sessions_opened_total{topic}: sessions opened or continued
counter embarcadero_sessions_closed_total{topic}: sessions closed by their publishers
counter embarcadero_sessions_fenced_total{topic,why}: sessions fenced: gap, overflow, idle, replaced, restart
gauge embarcadero_level5_clients_active: open strong sessions
gauge embarcadero_hold_buffer_entries: batches that wait for a gap to close
gauge embarcadero_hold_buffer_slots: capacity of the reorder buffer
counter embarcadero_hold_buffer_timeouts_total: gaps that reached their timeout
counter embarcadero_gaps_skipped_total: gaps declared lost (on_gap=skip)
gauge embarcadero_sequencer_hold_buffer_entries{topic}: batches that wait for a gap to close, by topic
gauge embarcadero_sequencer_hold_buffer_age_ms{topic}: age of the oldest gap; 0 without a gap
histogram embarcadero_sequencer_cascade_release_depth{topic}: waiting batches released together
counter embarcadero_sequencer_skip_total{topic,reason}: SKIP entries; the reason is always timeout
gauge embarcadero_sequencer_checkpoint_write_duration_us{topic}: duration of the last checkpoint
gauge embarcadero_sequencer_checkpoint_age_sec{topic}: age of the last checkpoint; 0 before the first
gauge embarcadero_sequencer_checkpoint_client_count{topic}: sessions in the last checkpoint
gauge embarcadero_sequencer_durable_index{topic}: batches and session entries below were durable at the last count
counter embarcadero_sequencer_roomless_total{topic}: entries refused because too many entries are not durable yet
counter embarcadero_ranges_sealed_total: ranges sealed by this sequencer, usually to replace a replica
counter embarcadero_range_seals_failed_total: failed attempts to seal a range
gauge embarcadero_lanes_recovering: lanes that wait for replicas after a restart
counter embarcadero_lanes_recovered_total: lanes recovered from disk
gauge embarcadero_recovery_seconds: from the start of this epoch to the recovery of the last lane; 0 without a recovery
""")

REPLICA: Final = _table("""
counter embarcadero_replica_entries_total{replica}: entries appended from the fabric
counter embarcadero_replica_bytes_total{replica}: payload bytes appended from the fabric
counter embarcadero_replica_commits_total{replica}: commits: each is one fdatasync for all entries appended before it
histogram embarcadero_replica_commit_entries{replica}: entries of a commit
histogram embarcadero_replica_fsync_latency_seconds{replica}: duration of a commit's fdatasync
counter embarcadero_replica_repaired_entries_total{replica}: entries copied from other replicas' files
counter embarcadero_replica_repaired_bytes_total{replica}: payload bytes copied from other replicas' files
counter embarcadero_replica_damage_total{replica}: damaged pieces found in its files
counter embarcadero_replica_disk_errors_total{replica}: writes, syncs and opens that failed
counter embarcadero_replica_checkpoints_total{replica}: session checkpoints written to disk
counter embarcadero_replica_dropped_bytes_total{replica}: bytes of segments removed by trims and retention
counter embarcadero_replica_scrubbed_bytes_total{replica}: bytes of old segments read and verified
gauge embarcadero_replica_trouble{replica,trouble}: 1 while it lasts: disk_full, disk_failed, read_only, damaged
gauge embarcadero_replica_ranges{replica,state}: its ranges: open, complete, incomplete, not opened yet
gauge embarcadero_replica_disk_bytes{replica}: bytes of its segments
gauge embarcadero_replica_disk_free_bytes{replica}: free space on its disk
gauge embarcadero_replication_lag_batches{replica,topic,lane}: lag of its durable line behind the ordered frontier
""")

ALL: Final = (*NODE, *BROKER, *SEQUENCER, *REPLICA)
BY_NAME: Final = {metric.name: metric for metric in ALL}

_MAPPED = "the fabric is mapped memory: processors move the bytes, and there is no call to count or to time; see"

SEEDS: Final[dict[str, str]] = {
    "embarcadero_publish_bytes_total": "also by topic",
    "embarcadero_publish_batches_total": "also by topic",
    "embarcadero_subscribe_bytes_total": "also by topic",
    "embarcadero_publish_latency_seconds": "a histogram: compute quantiles with histogram_quantile()",
    "embarcadero_e2e_latency_seconds": "a histogram, from the append time on; the metric above has a publisher's wait",
    "embarcadero_sequencer_latency_seconds": "a histogram",
    "embarcadero_level5_clients_active": "",
    "embarcadero_hold_buffer_entries": "",
    "embarcadero_hold_buffer_timeouts_total": "",
    "embarcadero_gaps_skipped_total": "",
    "embarcadero_duplicates_rejected_total": "by broker; a duplicate is answered with the first copy's position",
    "embarcadero_sequencer_hold_buffer_entries": "by topic: the sequencer has no shards",
    "embarcadero_sequencer_hold_buffer_age_ms": "by topic; for the oldest gap, without quantiles",
    "embarcadero_sequencer_cascade_release_depth": "by topic; a histogram",
    "embarcadero_sequencer_skip_total": "by topic; the reason is always timeout",
    "embarcadero_sequencer_nop_entries_total": "gone, because there are no NOP entries: results resolve duplicates",
    "embarcadero_sequencer_checkpoint_write_duration_us": "by topic",
    "embarcadero_sequencer_checkpoint_age_sec": "by topic",
    "embarcadero_sequencer_checkpoint_client_count": "by topic",
    "embarcadero_replication_lag_batches": "by replica and lane",
    "embarcadero_replica_fsync_latency_seconds": "a histogram, by replica",
    "embarcadero_broker_failures_total": "counted by the sequencer of the epoch",
    "embarcadero_sequencer_failovers_total": "",
    "embarcadero_epoch_increments_total": "",
    "embarcadero_cxl_read_bytes_total": f"gone, because {_MAPPED} embarcadero_subscribe_bytes_total",
    "embarcadero_cxl_write_bytes_total": f"gone, because {_MAPPED} embarcadero_publish_bytes_total",
    "embarcadero_cxl_read_latency_ns": f"gone, because {_MAPPED} embarcadero_e2e_latency_seconds",
    "embarcadero_cxl_write_latency_ns": f"gone, because {_MAPPED} embarcadero_publish_latency_seconds",
}
"""Metrics of the first design: a remark, or the reason for the removal."""


# --- page -------------------------------------------------------------------------------------------------------------
# A page of metrics in the Prometheus text format.
#
# Not written with a library, because it runs in a broker's event loop: this code takes a tenth of the time.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Page:
    """Samples, grouped by metric."""

    def __init__(self) -> None:
        self._lines: defaultdict[str, list[str]] = defaultdict(list)

    def put(self, name: str, value: float, **labels: object) -> None:
        """Add one value of a counter or gauge."""
        invariant(BY_NAME[name].labels == tuple(labels), f"{name} has its labels")
        self._lines[name].append(f"{name}{_braces(labels)} {value}")

    def histogram(self, name: str, found: Histogram, unit: float = 1, **labels: object) -> None:
        """Add a histogram; multiply its bounds and its sum by `unit`."""
        invariant(BY_NAME[name].labels == tuple(labels), f"{name} has its labels")
        lines, sums = self._lines[name], list(itertools.accumulate(found.counts))
        for bound, count in zip([f"{bound * unit:g}" for bound in found.bounds] + ["+Inf"], sums, strict=True):
            lines.append(f"{name}_bucket{_braces(labels | {'le': bound})} {count}")
        lines.append(f"{name}_sum{_braces(labels)} {found.total * unit}")
        lines.append(f"{name}_count{_braces(labels)} {sums[-1]}")

    def text(self) -> bytes:
        """Return the page."""
        made = []
        for name, lines in self._lines.items():
            metric = BY_NAME[name]
            made += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}", *lines]
        return ("\n".join(made) + "\n").encode()


def _braces(labels: dict[str, object]) -> str:
    """Format labels. Their values are numbers and our own names, so they need no escapes."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""


# --- roles ------------------------------------------------------------------------------------------------------------
_US: Final = 1e-6
_PAGE_BYTES: Final = os.sysconf("SC_PAGESIZE")
_STARTED_S: Final = time.time()


class WatchedRole(Protocol):
    """A role of this process."""

    @property
    def name(self) -> str:
        """The current name of the role."""
        ...

    def write(self, page: Page) -> None:
        """Add the metrics of the role to the page."""
        ...

    async def unready(self) -> str:
        """Return the reason why the role cannot work now; empty if it can."""
        ...


def write_process(page: Page) -> None:
    """Add the metrics of this process."""
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
        """A broker is ready while it is a member and the sequencer sends heartbeats. Waits for the next heartbeat."""
        broker, give_up = self._broker, time.monotonic() + SILENT_S
        first = broker.epoch.heartbeat()
        while True:
            if broker.deposed or broker.leaving:
                return "leaving" if broker.leaving else "another incarnation has replaced it"
            if broker.epoch.number == 0:
                return "no sequencer has started an epoch yet"
            if broker.epoch.heartbeat() != first:
                return ""
            if time.monotonic() > give_up:
                return f"the sequencer of epoch {first[0]} has been silent for {SILENT_S:g} s"
            await asyncio.sleep(HEARTBEAT_S / 4)

    def write(self, page: Page) -> None:
        """Add the metrics of the broker."""
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
        """Add metrics of waits for disks, and of reads from disks."""
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
        """A sequencer is ready from the start of its epoch to the start of the next epoch."""
        return "another sequencer has taken over" if self.sequencer.deposed else ""

    def write(self, page: Page) -> None:
        """Add the metrics of the sequencer."""
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


# --- sequencer process ------------------------------------------------------------------------------------------------
# A sequencer process at the endpoint: the leader of an epoch, or a standby.
class WatchedCandidate:
    """One sequencer process, over all epochs in which it leads."""

    def __init__(self, number: int, clock: Clock) -> None:
        self._number, self._clock = number, clock
        self._leader: WatchedSequencer | None = None

    @property
    def sequencer(self) -> Sequencer | None:
        """The sequencer of the epoch it leads; None while it stands by."""
        return None if self._leader is None else self._leader.sequencer

    def lead(self, sequencer: Sequencer) -> None:
        """Switch to leader, with the sequencer of the new epoch."""
        self._leader = WatchedSequencer(sequencer, self._clock)

    def stand_by(self) -> None:
        """Switch to standby."""
        self._leader = None

    @property
    def name(self) -> str:
        """`sequencer-<epoch>`, or `standby-<candidate>`."""
        return f"standby-{self._number}" if self._leader is None else self._leader.name

    async def unready(self) -> str:
        """A standby is always ready."""
        return "" if self._leader is None else await self._leader.unready()

    def write(self, page: Page) -> None:
        """Add whether it stands by, and the metrics of the sequencer while it leads."""
        page.put("embarcadero_sequencer_standby", int(self._leader is None), candidate=self._number)
        if self._leader is not None:
            self._leader.write(page)


# --- replica ----------------------------------------------------------------------------------------------------------
# A replica at the endpoint: its counters, the lag of its lanes, and its readiness.


class WatchedReplica:
    """One replica incarnation."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self.name = replica, replica.member.ref.region_prefix

    async def unready(self) -> str:
        """A replica is ready while it is a member and its disk accepts writes."""
        replica = self._replica
        if replica.deposed:
            return "another incarnation has replaced it"
        if replica.health.trouble & ~Trouble.DAMAGED:
            return f"{'; '.join(health_in_words(replica.health.trouble))} ({replica.health.reason})"
        return ""

    def write(self, page: Page) -> None:
        """Add the metrics of the replica."""
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


# --- docs -------------------------------------------------------------------------------------------------------------
# docs/metrics.md, generated from the table: `python -m embarcadero.watch.metrics > docs/metrics.md`.
_HEAD = """# Metrics

Every node process serves four pages over HTTP:

- `/metrics`: the metrics, in the Prometheus text format;
- `/health` and `/ready`: small JSON documents;
- `/targets`: the addresses of all processes of the cluster, for Prometheus's `http_sd_configs`.

[operations-systemd](operations-systemd.md) has the scrape configuration, alert rules and a dashboard.

A process that died stays in `/targets` until it runs again, so Prometheus has `up == 0` for it. A
process that was stopped in order leaves the list.

`embarcadero status` prints the addresses. `embarcadero up --metrics-port 9100` makes the ports
fixed: 9100 for the first sequencer, 9101 for broker 0, and so on. Replicas follow the last broker.
With `--processes one` there is only 9100. When a standby takes over, its process serves the metrics
of the sequencer, so let Prometheus discover the ports.

The pages are on loopback unless `--metrics-host` sets another address. They need no password, so
expose them only to networks that you trust.

| page | 200 when | else |
| --- | --- | --- |
| `/health` | all roles of the process run | 503, and the roles that do not run |
| `/ready` of a broker | it is a member and the sequencer sends heartbeats | 503, and the reason |
| of the sequencer | its epoch is the newest | 503, and the reason |
| of a replica | it is a member and its disk accepts writes | 503, and the reason |

A page costs its process about a millisecond. Without requests there is no cost: roles keep plain
counters, updated once for each batch or round. Counters start from zero with every incarnation.

A reader that moved to another broker may be counted at the earlier broker for a minute. A reader
that sends no fetch for a minute is not counted any more, and neither is its lag: a broker cannot
distinguish a reader that ended from a reader that is stuck. If a topic must always have a reader,
also alert on `embarcadero_readers`, or check the positions of named readers
(`embarcadero topic describe`).
"""


def metrics_page() -> str:
    """Return docs/metrics.md."""
    parts = [_HEAD]
    tables = {"Of every process": NODE, "Of a broker": BROKER, "Of the sequencer": SEQUENCER, "Of a replica": REPLICA}
    for title, metrics in tables.items():
        parts.append(f"\n## {title}\n\n| name | kind | labels | meaning |\n| --- | --- | --- | --- |\n")
        parts += [_row(metric) for metric in metrics]
    parts.append("\n## Metrics of the first design\n\n| name in the first design | now |\n| --- | --- |\n")
    parts += [f"| `{name}` | {remark or 'unchanged'} |\n" for name, remark in SEEDS.items()]
    return "".join(parts)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |\n"


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
