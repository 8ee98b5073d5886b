"""The second act of the demo: a shop's day through log, streaming query, table, SQL and audit, with kills meanwhile.

Threads play the parts: the shop publishes, the tier job writes the table, the director kills processes. The streaming
query runs in Spark. The parts communicate only through the log. At the end, the books of the shop are compared with the
results.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

import embarcadero as emb
from embarcadero.demo.durable import kill_sequencer, watch_takeover
from embarcadero.demo.shop import (
    ORDERS,
    PAYMENTS,
    SALES,
    RunFacts,
    Sample,
    Shop,
    ShopCheck,
    SqlAnswer,
    differences,
    write_report,
)
from embarcadero.errors import ClusterError, EmbarcaderoError
from embarcadero.node.local import RestartableCluster
from embarcadero.tier.job import TierJob
from embarcadero.tier.storage import TierSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

BROKERS: Final = 3
ORDERS_A_STEP: Final = 2_500
REPEATED_STEPS: Final = 3
REPEAT_EVERY: Final = 12
WATERMARK: Final = "10 minutes"  # longer than the delay of any order
_STEP_S: Final = 0.2
_SAMPLE_S: Final = 0.25
_PATIENCE_S: Final = 60.0

TOP_CITIES: Final = """
select o.city, count(*) as orders, sum(o.amount_cents) / 100 as sold, sum(p.amount_cents) / 100 as paid
from orders o left join payments p on p.order_id = o.order_id
group by o.city order by sold desc
"""
BY_HOUR: Final = """
select date_format(window_start, 'HH:00') as hour, sum(orders) as orders, sum(amount_cents) / 100 as sold
from sales group by 1 order by 1
"""


class SoldBatch(NamedTuple):
    """A batch of orders: the seq of its first order, the number of orders before it, and the number of its orders."""

    seq: int
    before: int
    orders: int


class Pipeline:
    """State shared by the threads; each field has one writer."""

    def __init__(self, cluster: RestartableCluster, folder: Path, steps: int) -> None:
        self.cluster, self.folder, self.steps = cluster, folder, steps
        self.shop = Shop(seed=31)
        self.facts = RunFacts()
        self.published = 0  # orders that were acked durable
        self.batches: list[SoldBatch] = []  # in the order of the log
        self.repeated = 0  # batches sent a second time
        self.waited_s: list[tuple[float, float]] = []  # time of an ack, and the wait for it
        self.tiered_files = 0
        self.aggregated = 0
        self.aggregated_seq = -1
        self.done_selling = threading.Event()
        self.stop_tiering = threading.Event()
        self.problem: BaseException | None = None
        self.began = time.monotonic()
        self.phase = "starting"

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def note(self, position: emb.Position | None, orders: int) -> None:
        """Record that a batch of orders is durable at this position."""
        if position is None:
            raise ClusterError("an ack without a position", "report it: this is a bug")
        self.batches.append(SoldBatch(position.seq, self.published, orders))

    def records_below(self, seq: int) -> int:
        """The number of orders below a seq. Seqs that the kill of all processes left unused hold no orders."""
        batch = bisect_right(self.batches, seq, key=lambda sold: sold.seq) - 1
        if batch < 0:
            return 0
        first, before, count = self.batches[batch]
        return before + min(seq - first, count)

    def tell(self, line: str) -> None:
        """Add a line to the story."""
        self.facts.story.append((self.elapsed, line))

    def play(self, part: Callable[[Pipeline], None]) -> threading.Thread:
        """Run a part in a thread; an exception in it ends the demo."""

        def run() -> None:
            try:
                part(self)
            except BaseException as error:
                self.problem = self.problem or error
                self.done_selling.set()
                self.stop_tiering.set()

        thread = threading.Thread(target=run, name=part.__name__, daemon=True)
        thread.start()
        return thread

    def check(self) -> None:
        """Raise the exception that ended a part, if any."""
        if self.problem is not None:
            raise self.problem


# --- the parts --------------------------------------------------------------------------------------------------------
def sell(pipeline: Pipeline) -> None:
    """Publish a batch of orders and a batch of payments each step. Regularly publish the last batches again."""
    till = "till-1"
    with emb.connect(pipeline.cluster.addresses) as log:
        payments = log.publisher("payments", ack=2)
        orders = log.publisher("orders", ack=2, session=till)
        sent: list[pa.RecordBatch] = []
        for step in range(pipeline.steps):
            began = time.monotonic()
            sold, paid = pipeline.shop.step(ORDERS_A_STEP)
            sent.append(sold.combine_chunks().to_batches()[0])
            asked = time.monotonic()
            future = orders.publish(sent[-1])
            payments.publish(paid.combine_chunks().to_batches()[0])
            pipeline.note(future.result(timeout=_PATIENCE_S), sold.num_rows)
            pipeline.waited_s.append((time.monotonic(), time.monotonic() - asked))
            pipeline.published = pipeline.shop.books.orders
            if (step + 1) % REPEAT_EVERY == 0:
                orders.close()
                orders = log.publisher("orders", ack=2, session=till, session_at=len(sent) - REPEATED_STEPS)
                for batch in sent[-REPEATED_STEPS:]:
                    orders.publish(batch)
                pipeline.repeated += REPEATED_STEPS
            time.sleep(max(0.0, _STEP_S - (time.monotonic() - began)))
        last = orders.publish(pipeline.shop.closing().combine_chunks().to_batches()[0]).result(timeout=_PATIENCE_S)
        pipeline.note(last, 1)
        orders.close()
        payments.close()
    pipeline.published = pipeline.shop.books.orders
    pipeline.tell(f"the shop closes: {pipeline.published:,} orders; {pipeline.repeated} batches were sent twice")
    pipeline.done_selling.set()


def tier(pipeline: Pipeline) -> None:
    """Run the tier job: move durable records into an Iceberg table, and release them from the replicas' disks."""
    settings = TierSettings.local(pipeline.folder / "tier", hot_retention_s=2, interval_s=1.0)

    def on_cycle(cycle: Any) -> None:
        pipeline.tiered_files += cycle.files

    with emb.connect(pipeline.cluster.addresses) as log, TierJob(log, "orders", settings, holder="demo") as job:
        job.follow(pipeline.stop_tiering, on_cycle)
        job.run_once()
    pipeline.tell(f"the tier has {pipeline.tiered_files} files of orders")


def wait_for_share(pipeline: Pipeline, share: float) -> None:
    """Wait until the shop has sold this share of the day's orders."""
    while pipeline.published < share * pipeline.steps * ORDERS_A_STEP and not pipeline.done_selling.is_set():
        time.sleep(0.05)


def kill_a_broker(pipeline: Pipeline) -> None:
    """Kill a broker; the supervisor restarts it."""
    pid = pipeline.cluster.kill_broker(1)
    pipeline.facts.kills.append((pipeline.elapsed, "broker 1"))
    pipeline.tell(f"broker 1 is killed (kill -9 of process {pid}); clients switch to the other brokers")


def kill_the_sequencer(pipeline: Pipeline) -> None:
    """Kill the leading sequencer; a standby takes over."""
    pid, epoch = kill_sequencer(pipeline.cluster)
    since = time.monotonic()
    pipeline.facts.kills.append((pipeline.elapsed, "sequencer"))
    pipeline.tell(f"the sequencer is killed (kill -9 of process {pid}); orders keep arriving")
    done = watch_takeover(pipeline.cluster, pid, epoch, since, lambda: [moment for moment, _ in pipeline.waited_s])
    longest = max(waited for moment, waited in pipeline.waited_s if moment > since)
    pipeline.facts.cards["longest wait for an ack when the sequencer was killed"] = f"{longest * 1_000:,.0f} ms"
    pipeline.tell(f"{done.role} took over in epoch {done.epoch}; no ack took longer than {longest * 1_000:,.0f} ms")


def kill_everything(pipeline: Pipeline) -> None:
    """Kill the whole cluster, and restart it from its disks."""
    killed = pipeline.cluster.kill_all()
    pipeline.facts.kills.append((pipeline.elapsed, "everything"))
    pipeline.tell(f"all {killed} processes of the cluster are killed, and shared memory is removed")
    took = pipeline.cluster.start()
    pipeline.tell(f"the cluster recovered from its disks in {took:.1f} s; shop, query and tier job continue")


def direct(pipeline: Pipeline) -> None:
    """Direct the act: kill a broker, then the sequencer, then every process together."""
    wait_for_share(pipeline, 0.25)
    kill_a_broker(pipeline)
    wait_for_share(pipeline, 0.4)
    kill_the_sequencer(pipeline)
    wait_for_share(pipeline, 0.65)
    kill_everything(pipeline)


def sample(pipeline: Pipeline) -> None:
    """Sample the progress, for the picture."""
    with emb.connect(pipeline.cluster.addresses) as log:
        while not pipeline.stop_tiering.wait(_SAMPLE_S):
            now = Sample(pipeline.elapsed, published=pipeline.published, aggregated=pipeline.aggregated)
            try:
                tail, about = log.tail("orders", timeout=2.0), log.describe("orders", timeout=2.0)
            except EmbarcaderoError:
                continue  # the cluster is down at the moment
            now.tiered = 0 if about.tier is None else pipeline.records_below(about.tier.frontier(tail.lane)[1])
            now.released = pipeline.records_below(tail.hot_seq)
            pipeline.facts.samples.append(now)


# --- Spark ------------------------------------------------------------------------------------------------------------
def start_query(spark: SparkSession, addresses: Sequence[str], checkpoint: Path) -> StreamingQuery:
    """Start the query: sales by city in windows of the shop's time. Each window is written once, at its end."""
    from pyspark.sql import functions as F  # noqa: N812 - the usual name

    address = ",".join(addresses)
    orders = (
        spark.readStream.format("embarcadero")
        .option("brokers", address)
        .option("topic", "orders")
        .option("startingOffsets", "earliest")
        .load()
    )
    sales = (
        orders.withWatermark("event_time", WATERMARK)
        .groupBy(F.window("event_time", "15 minutes"), "city")
        .agg(F.count("*").alias("orders"), F.sum("amount_cents").alias("amount_cents"))
        .select(F.col("window.start").alias("window_start"), "city", "orders", "amount_cents")
    )
    return (
        sales.writeStream.format("embarcadero")
        .option("brokers", address)
        .option("topic", "sales")
        .option("checkpointLocation", str(checkpoint))
        .outputMode("append")
        .trigger(processingTime="1 second")
        .start()
    )


def seq_of(query: StreamingQuery) -> int:
    """The position that a query has read up to; -1 before its first batch."""
    progress = query.lastProgress
    if progress is None or not progress.sources or not progress.sources[0].endOffset:
        return -1
    offset = json.loads(progress.sources[0].endOffset)
    return max(int(position["seq"]) for lane, position in offset.items() if lane.isdigit())


def watch_query(pipeline: Pipeline, query: StreamingQuery, log: emb.Log) -> None:
    """Follow the query until it has read every order, then stop it."""
    while not seen_all(pipeline, seq_of(query), log):
        pipeline.check()
        if not query.isActive:
            raise ClusterError(f"the streaming query ended: {query.exception()}", "see the message of the query")
        time.sleep(0.1)
    query.processAllAvailable()
    query.stop()


def seen_all(pipeline: Pipeline, seq: int, log: emb.Log) -> bool:
    """Record the progress of the query; return whether it has read every order."""
    if seq < 0:
        return False
    if seq != pipeline.aggregated_seq:
        pipeline.aggregated = pipeline.records_below(seq)
        pipeline.aggregated_seq = seq
    return pipeline.done_selling.is_set() and seq >= log.tail("orders").durable_seq


# --- checks -----------------------------------------------------------------------------------------------------------
def look(pipeline: Pipeline, spark: SparkSession, log: emb.Log) -> None:
    """Query brokers and table with SQL, compare with the books, and run the audit."""
    from embarcadero.spark.auditing import audit
    from embarcadero.spark.sql import ask

    facts, books = pipeline.facts, pipeline.shop.books
    for title, query in (("Cities, over memory, disks and table", TOP_CITIES), ("Hours of the day", BY_HOUR)):
        facts.answers.append(SqlAnswer(title, query, ask(spark, log, query).toArrow()))
    facts.sales = log.read("sales").select(SALES.names)
    wrong = differences(books, facts.sales)
    windows = int((books.counts > 0).sum())
    facts.checks.append(
        ShopCheck(
            "every window of the streaming query once, with the sums of the shop's books",
            not wrong,
            "; ".join(wrong[:5]) or f"{windows} windows, {int(books.counts.sum()):,} orders",
        )
    )
    total = ask(spark, log, "select count(distinct order_id) n, sum(amount_cents) s from orders").toArrow().to_pylist()
    counted, cents = total[0]["n"], total[0]["s"]
    right = (counted, cents) == (books.orders, int(books.cents.sum()))
    facts.checks.append(
        ShopCheck("SQL over the whole log gives the shop's total", right, f"{counted:,} orders, {cents:,} cents")
    )
    cold = pipeline.records_below(log.tail("orders").hot_seq)
    facts.checks.append(
        ShopCheck("a part of the log is only in the table", cold > 0, f"{cold:,} of {books.orders:,} records")
    )
    for topic in ("orders", "payments", "sales"):
        found = audit(spark, log, topic)
        records = sum(lane.records for lane in found.lanes)
        detail = "; ".join(f"{one.kind}: {one.detail}" for one in found.findings[:5]) or f"{records:,} records"
        facts.checks.append(ShopCheck(f"audit of {topic}: positions, sessions, gaps, checksums", found.holds, detail))


def create_topics(log: emb.Log) -> None:
    """Create the topics of the shop."""
    for name, schema in (("orders", ORDERS), ("payments", PAYMENTS), ("sales", SALES)):
        log.create_topic(name, order=5, replicas=1, schema=schema)


def run(folder: Path, report: Path, steps: int, watch: Callable[[Pipeline], None]) -> Pipeline:
    """Run the whole act, and write the report. Calls `watch` regularly. Raises the first exception of a part."""
    from embarcadero.spark import session

    with ExitStack() as stack:
        cluster = RestartableCluster(folder / "cluster", BROKERS, 1)
        pipeline = Pipeline(cluster, folder, steps)
        stack.callback(cluster.stop)
        cluster.start()
        log = stack.enter_context(emb.connect(cluster.addresses))
        create_topics(log)
        pipeline.tell(f"a cluster of {BROKERS} brokers and a replica is up; Spark starts")
        spark = session("embarcadero demo", config={"spark.sql.shuffle.partitions": "2"})
        stack.callback(spark.stop)
        query = start_query(spark, cluster.addresses, folder / "checkpoint")
        while query.isActive and query.lastProgress is None:
            watch(pipeline)
            time.sleep(0.1)
        pipeline.tell("a streaming query follows the orders; the shop opens")
        pipeline.phase = "selling"
        parts = [pipeline.play(part) for part in (sell, tier, direct, sample)]
        follower = pipeline.play(lambda _: watch_query(pipeline, query, log))
        while follower.is_alive():
            watch(pipeline)
            time.sleep(0.1)
        pipeline.check()
        pipeline.tell("the query has read every order and written every window")
        pipeline.stop_tiering.set()
        for part in parts:
            part.join(_PATIENCE_S)
        pipeline.check()
        pipeline.phase = "looking"
        watch(pipeline)
        look(pipeline, spark, log)
        tell_figures(pipeline)
        write_report(pipeline.facts, report)
    return pipeline


def tell_figures(pipeline: Pipeline) -> None:
    """Set the figures at the head of the report."""
    facts, books = pipeline.facts, pipeline.shop.books
    facts.seconds = pipeline.elapsed
    facts.cards = {
        "orders and payments": f"{books.orders + books.payments:,}",
        "published late": f"{books.late:,}",
        "batches sent twice, stored once": f"{pipeline.repeated}",
        "windows of the query": f"{0 if facts.sales is None else facts.sales.num_rows:,}",
        "files in the table": f"{pipeline.tiered_files}",
        "killed": ", ".join(what for _, what in facts.kills) or "nothing",
        "checks that hold": f"{sum(check.holds for check in facts.checks)} of {len(facts.checks)}",
    } | facts.cards


def run_here(report: Path, steps: int, watch: Callable[[Pipeline], None]) -> Pipeline:
    """Run the act in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="embarcadero-demo-") as folder:
        return run(Path(folder), report, steps, watch)
