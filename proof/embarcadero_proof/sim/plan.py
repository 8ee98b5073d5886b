"""The plan of one seed's run, drawn before the run begins. Each seed has its own few kinds of faults, or none."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from embarcadero.config import FabricSizes
from embarcadero.limits import KIB
from embarcadero.types import OnGap, Order
from embarcadero_proof.sim.durable import Bias, DurablePlan, make_durable
from embarcadero_proof.sim.network import Weather
from embarcadero_proof.sim.steps import StepFault, draw_step_faults
from embarcadero_proof.sim.swarm import draw_rest_us, draw_swarm

SECOND_US: Final = 1_000_000

FAULT_KINDS: Final = (
    "broker-crash", "broker-crash-inside", "broker-pause", "broker-zombie", "host-crash", "publisher-crash",
    "publisher-pause", "publisher-zombie", "cut", "one-way-hole", "clog", "sequencer-pause",
)  # fmt: skip
"""Occasional faults. The weather, lost doorbells and interrupts are always there."""

CALM_KINDS: Final = ("lost-batch",)
"""Faults that hurt only one stream: all others must continue meanwhile (P9)."""

LANES_SHARE: Final = 0.4
"""Share of the runs that have an additional topic of order 0 or 1."""

STANDBYS_FROM_SEED: Final = 1_000
"""Runs of lower seeds have no standby sequencers: injected bugs' witnesses and kept seeds refer to those runs."""

BRIEF_FROM_SEED: Final = 4_000
BRIEF_TURN: Final = 16
"""From this seed on all but one in `BRIEF_TURN` runs are brief: more starts in the same time. The others also rest."""

COMPARED_FROM_SEED: Final = 70_000
"""From this seed on brief runs also end only when copies of open ranges are equal, or had all the time for that."""

LONG_FROM_SEED: Final = 70_000
LONG_SHARE: Final = 1 / 3
LONG_BATCHES: Final = (550, 650)
"""From this seed on this share of runs has a stream that wraps more than twice around the window of its session."""

MIXED_FROM_SEED: Final = 90_000
MIXED_SHARE: Final = 2 / 3
"""From this seed on this share of runs has a topic of order 2 with strong and weak publishers, and either `on_gap`."""

CLAIMED_FROM_SEED: Final = 110_000
"""From this seed on publishers of named sessions number their batches: a process continues at the session's number."""

REFERENCED_FROM_SEED: Final = 170_000
"""From this seed on some publishers stage batches in a topic of order 0 or 1, and others publish them by reference."""

SEQUENCER_FAULT_KINDS: Final = ("sequencer-crash", "sequencer-crash-inside", "sequencer-zombie")


@dataclass(slots=True)
class TopicPlan:
    """A topic of the run."""

    name: str
    order: Order
    on_gap: OnGap
    gap_timeout_ms: int
    partitions: int
    lane: int = -1  # known after the topic is created
    replicas: int = 0
    durable_on: int = 0
    id: int = 0  # known after the topic is created


@dataclass(slots=True)
class StreamPlan:
    """The stream that one publisher writes."""

    name: str
    topic: TopicPlan
    named: bool  # its session has a name, so a new process can continue it
    batches: int
    think_us: int
    burst: int
    window_bytes: int
    start_us: int
    large_rate: float
    ack: int = 1
    strong: bool = False  # its sessions ask to be strong in a topic of order 2
    size_span: int = 900  # range of batch sizes in bytes, except for large ones
    staging: bool = False  # others publish its batches by reference
    by_reference: bool = False


@dataclass(slots=True)
class ReaderPlan:
    """One subscriber."""

    name: str
    topic: TopicPlan
    by: str
    start_us: int
    partitions: list[int] | None
    seeks: int
    slow_us: int  # 0: takes all batches immediately
    max_bytes: int
    read: str = "ordered"


@dataclass(slots=True)
class Plan:
    """All choices of one seed."""

    seed: int
    sizes: FabricSizes
    topics: list[TopicPlan]
    streams: list[StreamPlan]
    readers: list[ReaderPlan]
    hosts: int
    brokers: int
    weather: Weather
    faults: dict[str, float]  # kind -> mean seconds between two of them
    fault_phase_us: int
    bell_loss: float
    sleep_max_us: int
    churn_rate: float  # per memory primitive
    interrupt_rate: float  # per memory primitive
    resend_after_us: int
    delivery_timeout_us: int
    durable: DurablePlan = field(default_factory=DurablePlan)
    sequencers: int = 0  # sequencers in elections; 0: a successor starts when the sequencer is gone
    steps: list[StepFault] = field(default_factory=list)  # faults at named steps
    faults_max: int | None = None  # later faults do not happen: for shrinking
    faults_off: frozenset[int] = frozenset()  # these faults do not happen either
    rest_us: int = 0  # how long no client calls after all is settled; 0: the run ends then

    @property
    def has_lanes(self) -> bool:
        """Whether it has a topic of order 0 or 1."""
        return any(topic.order <= Order.BROKER for topic in self.topics)


def make_plan(seed: int, sequencer_faults: bool = True, bias: Bias | None = None, swarm: bool = True) -> Plan:
    """Draw a run. With a bias, the run has only the faults that the bias names.

    `swarm`: the run may have further kinds of faults, and rests at the end. Injected bugs are searched without it.
    """
    rng = random.Random(f"{seed}:plan")
    topics = _topics(rng)
    dice = rng.random()
    quiet = dice < 0.25 and bias is None
    calm = dict.fromkeys(CALM_KINDS, 3.0) if dice < 0.12 else {}
    faults = calm if quiet else _faults(rng, sequencer_faults)
    if bias is not None:
        faults = {}
    brief = swarm and bias is None and seed >= BRIEF_FROM_SEED and seed % BRIEF_TURN != 0
    fault_phase_us = rng.randint(*((4, 12) if brief else (10, 45))) * SECOND_US
    sizes = _sizes(rng, crowded="publisher-crash" not in faults)
    streams, readers = _streams(rng, topics, fault_phase_us, brief), _readers(rng, topics, fault_phase_us)
    _add_lanes(random.Random(f"{seed}:lanes"), topics, streams, readers, fault_phase_us, faults)
    if seed >= REFERENCED_FROM_SEED:
        _add_references(random.Random(f"{seed}:references"), topics, streams, readers, fault_phase_us)
    durable = make_durable(seed, len(topics), quiet, bias)
    if durable.replicas:
        _add_copies(random.Random(f"{seed}:copies"), durable, topics, streams, readers, fault_phase_us)
        faults |= durable.faults
    if seed >= LONG_FROM_SEED and bias is None:
        _add_long_stream(random.Random(f"{seed}:long"), topics, streams, fault_phase_us)
    if seed >= MIXED_FROM_SEED:
        _mix_orders(random.Random(f"{seed}:orders"), topics, streams)
    sequencers = _sequencers(random.Random(f"{seed}:candidates"), faults) if seed >= STANDBYS_FROM_SEED else 0
    swarm = swarm and bias is None
    if swarm and not quiet:
        faults |= draw_swarm(seed, durable.replicas, len(durable.victims))
    return Plan(
        seed=seed,
        sequencers=sequencers,
        sizes=sizes,
        topics=topics,
        streams=streams,
        readers=readers,
        hosts=rng.randint(1, 4),
        brokers=rng.randint(2, 4),
        weather=_weather(rng, quiet),
        faults=faults,
        fault_phase_us=fault_phase_us,
        bell_loss=rng.choice([0.0, 0.0, 0.02, 0.3]),
        sleep_max_us=rng.choice([200_000, 400_000, 800_000]),
        churn_rate=rng.choice([0.002, 0.01, 0.03]),
        interrupt_rate=_interrupts(rng, bias),
        resend_after_us=rng.choice([1, 2, 3]) * SECOND_US,
        delivery_timeout_us=rng.choice([20, 40]) * SECOND_US,
        durable=durable,
        steps=[] if quiet or bias is not None else draw_step_faults(seed, fault_phase_us),
        rest_us=draw_rest_us(seed, lightly=sequencers > 0) if swarm and not brief else 0,
    )


def _sequencers(rng: random.Random, faults: dict[str, float]) -> int:
    """Draw the number of sequencers in elections. In runs with faults, some are also asked to hand over."""
    count = rng.choice([0, 1, 2, 2, 3])
    if count > 1 and faults.keys() - set(CALM_KINDS) and rng.random() < 0.6:
        faults["hand-over"] = rng.choice([2.0, 5.0])
    return count


def _interrupts(rng: random.Random, bias: Bias | None) -> float:
    rate = 0.0 if rng.random() < 0.2 else rng.choice([0.0005, 0.002, 0.006])
    return rate if bias is None or bias.interrupt_rate is None else bias.interrupt_rate


def _sizes(rng: random.Random, crowded: bool) -> FabricSizes:
    """Small sizes, so that rings wrap and chunks are reused. Crashed publishers leave sessions open for a day."""
    round_entries = rng.choice([16, 32])
    chunk_bytes = rng.choice([4, 8, 16]) * KIB
    log_bytes = chunk_bytes * rng.choice([8, 16])
    return FabricSizes(
        pending_slots=rng.choice([16, 32, 64, 128]),
        order_slots=round_entries * rng.choice([4, 8]),
        held_slots=rng.choice([32, 64, 256]),
        log_bytes=log_bytes,
        chunk_bytes=chunk_bytes,
        sessions=rng.choice([24, 64]) if crowded else 64,
        round_entries=round_entries,
        dead_log_bytes=log_bytes * rng.choice([0, 2, 100]),
    )


def _topics(rng: random.Random) -> list[TopicPlan]:
    kinds = [(Order.TOTAL, OnGap.FENCE), (Order.STRONG, OnGap.FENCE), (Order.STRONG, OnGap.SKIP)]
    topics = []
    for number in range(rng.randint(1, 2)):
        order, on_gap = rng.choice(kinds)
        timeout_ms = rng.randint(2_000, 8_000) if on_gap is OnGap.FENCE else rng.choice([20, 200, 1_000])
        topics.append(TopicPlan(f"topic-{number}", order, on_gap, timeout_ms, rng.choice([1, 1, 4])))
    return topics


def _streams(rng: random.Random, topics: list[TopicPlan], phase_us: int, brief: bool) -> list[StreamPlan]:
    count = rng.randint(2, 6)
    total = rng.randint(*((90, 130) if brief else (310, 380)))
    streams = []
    for number in range(count):
        batches, burst = total // count, rng.choice([1, 4, 8, 16, 40])
        streams.append(
            StreamPlan(
                name=f"s{number}",
                topic=topics[number % len(topics)],
                named=rng.random() < 0.5,
                batches=batches,
                think_us=max(1, phase_us * 8 // 10 // max(1, batches // burst)),
                burst=burst,
                window_bytes=rng.choice([16, 64, 256]) * KIB,
                start_us=rng.randrange(0, 2 * SECOND_US),
                large_rate=rng.choice([0.0, 0.02, 0.1]),
            )
        )
    return streams


def _add_long_stream(
    rng: random.Random, topics: list[TopicPlan], streams: list[StreamPlan], phase_us: int
) -> None:  # fmt: skip
    """Add a stream of many small batches to some runs: slots of its session's window are used again and again."""
    if rng.random() >= LONG_SHARE:
        return
    topic = rng.choice([topic for topic in topics if topic.order > Order.BROKER])
    batches, burst = rng.randint(*LONG_BATCHES), rng.choice([8, 40, 150])
    streams.append(
        StreamPlan(
            name="long",
            topic=topic,
            named=rng.random() < 0.5,
            batches=batches,
            think_us=max(1, phase_us * 8 // 10 // (batches // burst)),
            burst=burst,
            window_bytes=rng.choice([16, 64]) * KIB,
            start_us=rng.randrange(0, SECOND_US),
            large_rate=0.0,
            ack=rng.choice([1, 2]) if topic.replicas else 1,
            size_span=100,
        )
    )


def _mix_orders(rng: random.Random, topics: list[TopicPlan], streams: list[StreamPlan]) -> None:
    """Give most runs a topic of order 2 in which weak and strong publishers share one lane."""
    if rng.random() >= MIXED_SHARE:
        return
    topics[0].order = Order.TOTAL
    for topic in topics:
        if topic.order is Order.TOTAL and rng.random() < 0.4:
            topic.on_gap, topic.gap_timeout_ms = OnGap.SKIP, rng.choice([20, 200, 1_000])
    for stream in streams:
        stream.strong = stream.topic.order is Order.TOTAL and rng.random() < 0.5


def _readers(rng: random.Random, topics: list[TopicPlan], phase_us: int) -> list[ReaderPlan]:
    readers = [ReaderPlan(f"r{n}", topic, "index", 0, None, 0, 0, 256 * KIB) for n, topic in enumerate(topics)]
    for number in range(len(topics), 3):
        topic = rng.choice(topics)
        filtered = topic.partitions > 1 and rng.random() < 0.6
        readers.append(
            ReaderPlan(
                name=f"r{number}",
                topic=topic,
                by=rng.choice(["index", "earliest", "latest", "seq"]),
                start_us=rng.randrange(0, phase_us),
                partitions=sorted(rng.sample(range(topic.partitions), rng.randint(1, 2))) if filtered else None,
                seeks=rng.choice([0, 1, 3]),
                slow_us=rng.choice([0, 0, 30_000, 300_000]),
                max_bytes=rng.choice([4, 64, 256]) * KIB,
            )
        )
    return readers


def _add_lanes(
    rng: random.Random, topics: list[TopicPlan], streams: list[StreamPlan], readers: list[ReaderPlan], phase_us: int,
    faults: dict[str, float],
) -> None:  # fmt: skip
    """Add a topic of order 0 or 1 to some runs. If they have faults, brokers get more of them."""
    if rng.random() >= LANES_SHARE:
        return
    if faults.keys() - set(CALM_KINDS):
        faults.setdefault("broker-zombie", rng.choice([2.0, 5.0]))
        if rng.random() < 0.5:
            faults.setdefault("broker-crash-inside", 5.0)
    topic = TopicPlan("lanes", rng.choice([Order.NONE, Order.BROKER]), OnGap.FENCE, 5_000, rng.choice([1, 4]))
    topics.append(topic)
    for number in range(2):
        batches, burst = rng.randint(30, 60), rng.choice([1, 4, 16])
        think_us = max(1, phase_us * 8 // 10 // max(1, batches // burst))
        streams.append(
            StreamPlan(
                f"l{number}", topic, False, batches, think_us, burst, 64 * KIB, rng.randrange(0, 2 * SECOND_US),
                rng.choice([0.0, 0.05]),
            )
        )  # fmt: skip
    readers.append(ReaderPlan("lr0", topic, "earliest", 0, None, 0, 0, 64 * KIB))
    partitions = [0, 2] if topic.partitions > 1 and rng.random() < 0.5 else None
    readers.append(
        ReaderPlan(
            "lr1", topic, rng.choice(["earliest", "latest"]), rng.randrange(0, phase_us), partitions,
            rng.choice([0, 2]), rng.choice([0, 0, 30_000]), rng.choice([4, 64]) * KIB,
        )
    )  # fmt: skip


def _add_references(
    rng: random.Random, topics: list[TopicPlan], streams: list[StreamPlan], readers: list[ReaderPlan], phase_us: int
) -> None:  # fmt: skip
    """Add a topic in which two publishers stage batches, and two publishers that publish these by reference."""
    targets = [topic for topic in topics if topic.order > Order.BROKER]
    staging = TopicPlan("staging", rng.choice([Order.NONE, Order.BROKER]), OnGap.FENCE, 5_000, rng.choice([1, 4]))
    topics.append(staging)
    for number in range(4):
        by_reference = number >= 2
        batches, burst = rng.randint(*((20, 40) if by_reference else (30, 50))), rng.choice([1, 4, 16])
        streams.append(
            StreamPlan(
                name=f"reference-{number - 2}" if by_reference else f"staging-{number}",
                topic=rng.choice(targets) if by_reference else staging,
                named=by_reference and rng.random() < 0.7,
                batches=batches,
                think_us=max(1, phase_us * 7 // 10 // max(1, batches // burst)),
                burst=burst,
                window_bytes=64 * KIB,
                start_us=rng.randrange(0, 2 * SECOND_US),
                large_rate=rng.choice([0.0, 0.05]),
                size_span=rng.choice([2, 900]),
                staging=not by_reference,
                by_reference=by_reference,
            )
        )
    readers.append(ReaderPlan("staged", staging, "earliest", 0, None, 0, 0, 64 * KIB))


def _add_copies(
    rng: random.Random, durable: DurablePlan, topics: list[TopicPlan], streams: list[StreamPlan],
    readers: list[ReaderPlan], phase_us: int,
) -> None:  # fmt: skip
    """Give topics replicas, streams durable acks, readers durable reads, and let some readers begin late."""
    for topic, (replicas, durable_on) in zip(topics, durable.copies, strict=True):
        topic.replicas, topic.durable_on = replicas, durable_on
    for stream in streams:
        stream.ack = rng.choice([1, 2, 2]) if stream.topic.replicas else 1
    for reader in readers:
        reader.read = rng.choice(["ordered", "durable", "durable"])
    topic = rng.choice(topics)
    late_us = rng.randrange(phase_us // 2, phase_us)
    readers.append(ReaderPlan("warm", topic, "earliest", late_us, None, 1, 0, 16 * KIB, read="durable"))


def _weather(rng: random.Random, quiet: bool) -> Weather:
    weather = Weather(latency_us=rng.choice([50, 200, 2_000]), jitter_us=rng.choice([10, 200, 2_000]))
    if quiet:
        return weather
    if rng.random() < 0.3:
        weather.spike_rate, weather.spike_us = 0.02, rng.choice([50_000, 3_000_000])
    if rng.random() < 0.3:
        weather.dribble_rate = rng.choice([0.02, 0.3])
    if rng.random() < 0.25:
        weather.drop_rate = rng.choice([0.0, 0.002, 0.01])
        weather.repeat_rate = rng.choice([0.0, 0.02])
        weather.reorder_rate = rng.choice([0.0, 0.05])
    return weather


def _faults(rng: random.Random, sequencer_faults: bool) -> dict[str, float]:
    kinds = [*FAULT_KINDS, *SEQUENCER_FAULT_KINDS] if sequencer_faults else list(FAULT_KINDS)
    chosen = rng.sample(kinds, rng.randint(1, min(5, len(kinds))))
    return {kind: rng.choice([2.0, 5.0, 12.0]) for kind in sorted(chosen)}
