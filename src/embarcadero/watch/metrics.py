"""Every metric, in one table; the page of a process; what each role puts on it, and whether the role can do its work.

docs/metrics.md is made from the table. It also says what became of each metric of the first design.
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
    """One metric: a counter only grows, a gauge is as it is now, a histogram counts observations by size."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def _table(text: str) -> tuple[Metric, ...]:
    """Metrics, a line each: kind, name with labels, what it tells."""
    rows = re.findall(r"^(\w+) (\w+)(?:\{([\w,]+)\})?: (.+)$", text, re.MULTILINE)
    return tuple(Metric(name, kind, tuple(filter(None, labels.split(","))), what) for kind, name, labels, what in rows)


NODE: Final = _table("""
gauge embarcadero_up{role,version}: 1 for every role of this process
counter process_cpu_seconds_total: processor time of this process, user and system
gauge process_resident_memory_bytes: memory of this process, its part of the fabric included
gauge process_open_fds: open files and sockets of this process
gauge process_start_time_seconds: when this process started, seconds since 1970
""")

BROKER: Final = _table("""
counter embarcadero_publish_bytes_total{broker,topic}: payload bytes of batches that came in
counter embarcadero_publish_batches_total{broker,topic}: batches that came in
counter embarcadero_publish_records_total{broker,topic}: records of batches that came in
counter embarcadero_subscribe_bytes_total{broker,topic}: payload bytes served to readers
counter embarcadero_subscribe_batches_total{broker,topic}: batches served to readers
counter embarcadero_subscribe_records_total{broker,topic}: records served to readers
histogram embarcadero_publish_latency_seconds{broker}: from a whole batch at the broker to its outcome
histogram embarcadero_e2e_latency_seconds{broker}: from the append time to the answer of a waiting read
counter embarcadero_outcomes_total{broker,outcome}: answers to batches and session requests
counter embarcadero_duplicates_rejected_total{broker}: batches that were in the log already (DUP_OF, DUP)
gauge embarcadero_connections{broker}: clients connected now
counter embarcadero_connections_total{broker}: clients that ever connected
counter embarcadero_connections_ended_total{broker,error}: connections that the broker ended because of the peer
gauge embarcadero_pending_entries{broker}: pending entries that the sequencer has not taken
gauge embarcadero_pending_slots{broker}: room for pending entries
gauge embarcadero_unresolved_entries{broker}: entries without an outcome
gauge embarcadero_published_index{broker}: frontier: pending entries below are published
gauge embarcadero_read_through_index{broker}: frontier: pending entries below were taken by the sequencer
gauge embarcadero_log_occupancy_ratio{broker}: share of the broker log that unresolved payloads keep
gauge embarcadero_credit_bytes{broker}: what all clients together may send now
gauge embarcadero_backpressure{broker}: 1 while the broker grants no credit
counter embarcadero_backpressure_total{broker}: how often it stopped granting credit
gauge embarcadero_fetches_waiting{broker}: reads that wait for records
gauge embarcadero_unread_bytes{broker}: what clients have not read yet, and room for reads of files and tables
gauge embarcadero_unread_connections{broker}: connections that hold such answers
counter embarcadero_unread_waits_total{broker}: how often a read had to wait for the memory of answers
counter embarcadero_references_copied_total{broker}: batches by reference whose staged bytes were copied
gauge embarcadero_references_waiting{broker}: batches that wait for a staged one to be read from a file
gauge embarcadero_acks_waiting_for_disks{broker}: acks (ack=2) that wait until their batch is durable
gauge embarcadero_log_kept_for_disks_ratio{broker}: share of the broker log that is kept for replicas
gauge embarcadero_durable_index{broker,lane}: frontier: batches of the lane below are durable, as counted by the broker
gauge embarcadero_tier_lag_batches{broker,lane}: durable batches of the lane that are not in its topic's table yet
gauge embarcadero_warm_reads{broker}: reads of segment files that run or wait
counter embarcadero_warm_reads_total{broker}: reads of segment files
counter embarcadero_warm_reads_ahead_total{broker}: fetches whose segment file was read before they came
gauge embarcadero_readers{broker,topic}: connections that read a topic, and asked for records in the last minute
gauge embarcadero_reader_lag_batches{broker,topic}: how far the slowest of them is behind the ordered frontier
gauge embarcadero_lane_index{broker,topic}: orders 0 and 1, frontier of the broker's own lane: batches below are in it
gauge embarcadero_lane_seq{broker,topic}: the same: records below are in it
gauge embarcadero_followed_epoch{broker}: the epoch that the broker follows; 0 before the first
""")

SEQUENCER: Final = _table("""
gauge embarcadero_sequencer_standby{candidate}: 1 while this process stands by, 0 while it reigns and has the others
gauge embarcadero_epoch: the sequencer's epoch
counter embarcadero_epoch_increments_total: epochs opened since the fabric was made
counter embarcadero_sequencer_failovers_total: epochs opened after the first: each was a takeover
counter embarcadero_broker_failures_total: broker incarnations that this sequencer closed, whatever their end was
counter embarcadero_rounds_total: rounds, idle ones included
counter embarcadero_entries_total: pending entries decided on
histogram embarcadero_round_entries: entries of a round that had any
histogram embarcadero_sequencer_latency_seconds: duration of a round that had entries
gauge embarcadero_ordered_index{topic}: frontier: batches and session entries below are ordered
gauge embarcadero_ordered_seq{topic}: frontier: records below are ordered
gauge embarcadero_sessions{topic,state}: sessions in the table: open, or fenced and kept for a while
counter embarcadero_sessions_opened_total{topic}: sessions opened or continued
counter embarcadero_sessions_closed_total{topic}: sessions closed by their publishers
counter embarcadero_sessions_fenced_total{topic,why}: sessions fenced: gap, overflow, idle, replaced, restart
gauge embarcadero_level5_clients_active: open sessions that are strong
gauge embarcadero_hold_buffer_entries: batches that wait for a gap to close
gauge embarcadero_hold_buffer_slots: room for them
counter embarcadero_hold_buffer_timeouts_total: gaps whose time was over
counter embarcadero_gaps_skipped_total: gaps declared lost (on_gap=skip)
gauge embarcadero_sequencer_hold_buffer_entries{topic}: batches that wait, by topic
gauge embarcadero_sequencer_hold_buffer_age_ms{topic}: age of the oldest gap; 0 without one
histogram embarcadero_sequencer_cascade_release_depth{topic}: waiting batches released at once
counter embarcadero_sequencer_skip_total{topic,reason}: SKIP entries; the reason is always timeout
gauge embarcadero_sequencer_checkpoint_write_duration_us{topic}: duration of the last checkpoint
gauge embarcadero_sequencer_checkpoint_age_sec{topic}: age of the last checkpoint; 0 before the first
gauge embarcadero_sequencer_checkpoint_client_count{topic}: sessions in the last checkpoint
gauge embarcadero_sequencer_durable_index{topic}: batches and session entries below are on enough disks, as last counted
counter embarcadero_sequencer_roomless_total{topic}: entries refused because too much is not durable yet
counter embarcadero_ranges_sealed_total: ranges sealed by this sequencer, usually because a replica had to be replaced
counter embarcadero_range_seals_failed_total: attempts to do so that came to nothing
gauge embarcadero_lanes_recovering: lanes that wait for replicas after a restart
counter embarcadero_lanes_recovered_total: lanes that came back from disk
gauge embarcadero_recovery_seconds: from the start of this epoch to the last lane that came back; 0 without one
""")

REPLICA: Final = _table("""
counter embarcadero_replica_entries_total{replica}: entries appended from the fabric
counter embarcadero_replica_bytes_total{replica}: payload bytes appended from the fabric
counter embarcadero_replica_commits_total{replica}: commits: each is one fdatasync for whatever had come
histogram embarcadero_replica_commit_entries{replica}: entries of a commit
histogram embarcadero_replica_fsync_latency_seconds{replica}: duration of a commit's fdatasync
counter embarcadero_replica_repaired_entries_total{replica}: entries copied from other replicas' files
counter embarcadero_replica_repaired_bytes_total{replica}: payload bytes copied from other replicas' files
counter embarcadero_replica_damage_total{replica}: damaged pieces found in its files
counter embarcadero_replica_disk_errors_total{replica}: writes, syncs and opens that failed
counter embarcadero_replica_checkpoints_total{replica}: session checkpoints written to disk
counter embarcadero_replica_dropped_bytes_total{replica}: bytes of segments given up by trims and retention
counter embarcadero_replica_scrubbed_bytes_total{replica}: bytes of old segments read and checked
gauge embarcadero_replica_trouble{replica,trouble}: 1 while it has it: disk_full, disk_failed, read_only, damaged
gauge embarcadero_replica_ranges{replica,state}: its ranges: open, complete, incomplete, not opened yet
gauge embarcadero_replica_disk_bytes{replica}: bytes of its segments
gauge embarcadero_replica_disk_free_bytes{replica}: room on its disk
gauge embarcadero_replication_lag_batches{replica,topic,lane}: how far its durable line is behind the ordered frontier
""")

ALL: Final = (*NODE, *BROKER, *SEQUENCER, *REPLICA)
BY_NAME: Final = {metric.name: metric for metric in ALL}

_MAPPED = "the fabric is mapped memory: processors move the bytes, there is no call that could be counted or timed; see"

SEEDS: Final[dict[str, str]] = {
    "embarcadero_publish_bytes_total": "also by topic",
    "embarcadero_publish_batches_total": "also by topic",
    "embarcadero_subscribe_bytes_total": "also by topic",
    "embarcadero_publish_latency_seconds": "a histogram: take quantiles with histogram_quantile()",
    "embarcadero_e2e_latency_seconds": "a histogram, from the append time on; the one above has what a publisher waits",
    "embarcadero_sequencer_latency_seconds": "a histogram",
    "embarcadero_level5_clients_active": "",
    "embarcadero_hold_buffer_entries": "",
    "embarcadero_hold_buffer_timeouts_total": "",
    "embarcadero_gaps_skipped_total": "",
    "embarcadero_duplicates_rejected_total": "by broker; a duplicate is answered with the first copy's position",
    "embarcadero_sequencer_hold_buffer_entries": "by topic: the sequencer has no shards",
    "embarcadero_sequencer_hold_buffer_age_ms": "by topic; of the oldest gap, without quantiles",
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
"""Metrics of the seeds' appendix C: a remark, or why it is gone."""


# --- page -------------------------------------------------------------------------------------------------------------
# A page of metrics in the Prometheus text format.
#
# Written here, and not by a library, because it is made in a broker's event loop: this takes a tenth of the time.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Page:
    """Samples, grouped by metric."""

    def __init__(self) -> None:
        self._lines: defaultdict[str, list[str]] = defaultdict(list)

    def put(self, name: str, value: float, **labels: object) -> None:
        """One value of a counter or gauge."""
        invariant(BY_NAME[name].labels == tuple(labels), f"{name} has its labels")
        self._lines[name].append(f"{name}{_braces(labels)} {value}")

    def histogram(self, name: str, found: Histogram, unit: float = 1, **labels: object) -> None:
        """A histogram whose bounds and sum are multiplied by `unit`."""
        invariant(BY_NAME[name].labels == tuple(labels), f"{name} has its labels")
        lines, sums = self._lines[name], list(itertools.accumulate(found.counts))
        for bound, count in zip([f"{bound * unit:g}" for bound in found.bounds] + ["+Inf"], sums, strict=True):
            lines.append(f"{name}_bucket{_braces(labels | {'le': bound})} {count}")
        lines.append(f"{name}_sum{_braces(labels)} {found.total * unit}")
        lines.append(f"{name}_count{_braces(labels)} {sums[-1]}")

    def text(self) -> bytes:
        """The page."""
        made = []
        for name, lines in self._lines.items():
            metric = BY_NAME[name]
            made += [f"# HELP {name} {metric.text}", f"# TYPE {name} {metric.kind}", *lines]
        return ("\n".join(made) + "\n").encode()


def _braces(labels: dict[str, object]) -> str:
    """Labels as text. Their values are numbers and names of ours: nothing in them needs an escape."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""


# --- roles ------------------------------------------------------------------------------------------------------------
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
# A sequencer's process as the endpoint sees it: the sequencer of an epoch, or one that stands by.
class WatchedCandidate:
    """One sequencer process over all epochs that it leads."""

    def __init__(self, number: int, clock: Clock) -> None:
        self._number, self._clock = number, clock
        self._leader: WatchedSequencer | None = None

    @property
    def sequencer(self) -> Sequencer | None:
        """The sequencer that it is; None while it stands by."""
        return None if self._leader is None else self._leader.sequencer

    def lead(self, sequencer: Sequencer) -> None:
        """It leads an epoch, as this sequencer."""
        self._leader = WatchedSequencer(sequencer, self._clock)

    def stand_by(self) -> None:
        """It leads no more."""
        self._leader = None

    @property
    def name(self) -> str:
        """`sequencer-<epoch>`, or `standby-<candidate>`."""
        return f"standby-{self._number}" if self._leader is None else self._leader.name

    async def unready(self) -> str:
        """One that stands by is ready for that."""
        return "" if self._leader is None else await self._leader.unready()

    def write(self, page: Page) -> None:
        """Whether it stands by; everything of a sequencer if it is one."""
        page.put("embarcadero_sequencer_standby", int(self._leader is None), candidate=self._number)
        if self._leader is not None:
            self._leader.write(page)


# --- replica ----------------------------------------------------------------------------------------------------------
# A replica as the endpoint sees it: what it counts, how far its lanes are behind, and whether it can do its work.


class WatchedReplica:
    """One replica incarnation."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self.name = replica, replica.member.ref.region_prefix

    async def unready(self) -> str:
        """A replica is ready while it is a member and its disk takes what is written."""
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


# --- docs -------------------------------------------------------------------------------------------------------------
# docs/metrics.md, made from the catalog: `python -m embarcadero.watch.metrics > docs/metrics.md`.
_HEAD = """# Metrics

Every node process serves four pages over HTTP: `/metrics` in the Prometheus text format, `/health` and `/ready` as
small JSON, and `/targets`, the addresses of all processes of the cluster for Prometheus's `http_sd_configs`
([operations-systemd](operations-systemd.md) has the scrape configuration, alert rules and a dashboard). A process that
died stays in `/targets` until it runs again, so Prometheus has `up == 0` for it; one that was stopped in order leaves.
`embarcadero status` tells the addresses. `embarcadero up --metrics-port 9100` makes them fixed: the first sequencer's
is 9100, broker 0's 9101, and so on, replicas after the last broker; with `--processes one` there is only 9100. When a
sequencer that stands by takes over, its process serves the metrics of the sequencer, so let Prometheus discover ports.
They are on loopback unless `--metrics-host` says otherwise; nobody is asked for a password, so keep it to networks you
trust.

| page | 200 when | else |
| --- | --- | --- |
| `/health` | all roles of the process run | 503, and which does not |
| `/ready` of a broker | it is a member and the sequencer's heart beats | 503, and why |
| of the sequencer | its epoch is the newest | 503, and why |
| of a replica | it is a member and its disk takes what is written | 503, and why |

A page costs its process about a millisecond, and nothing while nobody asks: roles keep plain counters, touched once per
batch or per round. Counters start from zero with every incarnation. A reader that moved to another broker may be
counted at the earlier one for a minute. A reader that asks for nothing for a minute is not counted any more, nor is its
lag: whether it ended, or is stuck in its own work, a broker can't tell. For a topic that must be read, also alert on
`embarcadero_readers`, or look at the places of named readers (`embarcadero topic describe`).
"""


def metrics_page() -> str:
    """The whole page."""
    parts = [_HEAD]
    tables = {"Of every process": NODE, "Of a broker": BROKER, "Of the sequencer": SEQUENCER, "Of a replica": REPLICA}
    for title, metrics in tables.items():
        parts.append(f"\n## {title}\n\n| name | kind | labels | what |\n| --- | --- | --- | --- |\n")
        parts += [_row(metric) for metric in metrics]
    parts.append("\n## What became of the metrics of the first design\n\n| name there | here |\n| --- | --- |\n")
    parts += [f"| `{name}` | {remark or 'as it was'} |\n" for name, remark in SEEDS.items()]
    return "".join(parts)


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |\n"


if __name__ == "__main__":
    sys.stdout.write(metrics_page())
