"""A shop that takes orders and payments: a believable event stream, and the books by which every answer is checked.

The shop has a clock of its own that runs much faster than ours; a step is one minute of it. Some orders are late: they
happened minutes before they are told. Amounts are whole cents, so sums are exact and two ways to add them up agree to
the cent or one of them is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa

OPENS = datetime(2026, 1, 31, 8, 0, tzinfo=UTC)
STEP_S = 60
WINDOW_S = 15 * 60
LATE_S = 5 * 60
"""An order is told at most so long after it happened; a watermark above this loses none."""

LATE_SHARE = 0.05
CITIES = ("Lisbon", "Utrecht", "Oakland", "Kyoto", "Nairobi", "Recife", "Tartu", "Hobart")
PRODUCTS = ("espresso", "flat white", "green tea", "sourdough", "almond cake", "soup", "grain bowl", "lemonade")
METHODS = ("card", "phone", "cash", "voucher")

_TIME = pa.timestamp("us", tz="UTC")
ORDERS = pa.schema(
    [
        pa.field("order_id", pa.int64(), nullable=False),
        pa.field("customer", pa.int32(), nullable=False),
        pa.field("city", pa.string(), nullable=False),
        pa.field("product", pa.string(), nullable=False),
        pa.field("quantity", pa.int32(), nullable=False),
        pa.field("amount_cents", pa.int64(), nullable=False),
        pa.field("event_time", _TIME, nullable=False),
    ]
)
PAYMENTS = pa.schema(
    [
        pa.field("payment_id", pa.int64(), nullable=False),
        pa.field("order_id", pa.int64(), nullable=False),
        pa.field("method", pa.string(), nullable=False),
        pa.field("amount_cents", pa.int64(), nullable=False),
        pa.field("event_time", _TIME, nullable=False),
    ]
)
SALES = pa.schema(
    [
        pa.field("window_start", _TIME, nullable=False),
        pa.field("city", pa.string(), nullable=False),
        pa.field("orders", pa.int64(), nullable=False),
        pa.field("amount_cents", pa.int64(), nullable=False),
    ]
)

Ints = npt.NDArray[np.int64]
_OPENS_US = int(OPENS.timestamp()) * 1_000_000
_PRICES = np.array([280, 390, 310, 650, 420, 780, 1150, 340], dtype=np.int64)
_TASTES = np.array([22, 18, 8, 10, 12, 9, 13, 8]) / 100
_SIZES = np.array([20, 15, 18, 14, 11, 10, 7, 5]) / 100


@dataclass(slots=True)
class Books:
    """What was really sold, by window and city: counts and cents, both as rows of windows by columns of cities."""

    counts: Ints = field(default_factory=lambda: np.zeros((0, len(CITIES)), dtype=np.int64))
    cents: Ints = field(default_factory=lambda: np.zeros((0, len(CITIES)), dtype=np.int64))
    paid_cents: int = 0
    orders: int = 0
    payments: int = 0
    late: int = 0

    def note(self, times_us: Ints, cities: Ints, cents: Ints) -> None:
        """Add orders."""
        windows = (times_us - _OPENS_US) // (WINDOW_S * 1_000_000)
        missing = int(windows.max()) + 1 - len(self.counts)
        if missing > 0:
            self.counts, self.cents = (np.pad(table, ((0, missing), (0, 0))) for table in (self.counts, self.cents))
        np.add.at(self.counts, (windows, cities), 1)
        np.add.at(self.cents, (windows, cities), cents)
        self.orders += len(cents)


class Shop:
    """Orders and payments, step by step. The same seed gives the same day."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._steps = 0
        self.books = Books()

    @property
    def clock_us(self) -> int:
        """The shop's time."""
        return _OPENS_US + self._steps * STEP_S * 1_000_000

    def step(self, count: int) -> tuple[pa.Table, pa.Table]:
        """A minute's orders, and the payments that come with it."""
        rng, books = self._rng, self.books
        busy = 0.6 + 0.4 * np.sin(self._steps / 40.0)  # mornings, lunch, afternoons
        count = max(1, int(count * (0.4 + busy)))
        times = self.clock_us + np.sort(rng.integers(0, STEP_S * 1_000_000, count))
        late = rng.random(count) < LATE_SHARE
        times[late] -= rng.integers(0, LATE_S * 1_000_000, int(late.sum()))
        times = np.maximum(times, _OPENS_US)
        cities = rng.choice(len(CITIES), count, p=_SIZES)
        products = rng.choice(len(PRODUCTS), count, p=_TASTES)
        quantities = 1 + rng.poisson(0.7, count)
        cents = _PRICES[products] * quantities
        first = books.orders
        orders = pa.table(
            [
                pa.array(np.arange(first, first + count)),
                pa.array(rng.integers(0, 20_000, count, dtype=np.int32)),
                pa.array(np.array(CITIES, dtype=object)[cities], pa.string()),
                pa.array(np.array(PRODUCTS, dtype=object)[products], pa.string()),
                pa.array(quantities.astype(np.int32)),
                pa.array(cents),
                pa.array(times).cast(_TIME),
            ],
            schema=ORDERS,
        )
        books.note(times, cities, cents)
        books.late += int(late.sum())
        payments = self._payments(np.arange(first, first + count), cents, times)
        self._steps += 1
        return orders, payments

    def _payments(self, orders: Ints, cents: Ints, times: Ints) -> pa.Table:
        """Most orders are paid within seconds; some never are."""
        rng, books = self._rng, self.books
        paid = rng.random(len(orders)) < 0.97
        count = int(paid.sum())
        first, books.payments = books.payments, books.payments + count
        books.paid_cents += int(cents[paid].sum())
        methods = np.array(METHODS, dtype=object)[rng.choice(len(METHODS), count, p=[0.55, 0.25, 0.15, 0.05])]
        return pa.table(
            [
                pa.array(np.arange(first, first + count)),
                pa.array(orders[paid]),
                pa.array(methods, pa.string()),
                pa.array(cents[paid]),
                pa.array(times[paid] + rng.integers(0, 20_000_000, count)).cast(_TIME),
            ],
            schema=PAYMENTS,
        )

    def closing(self) -> pa.Table:
        """One last order, far enough in the shop's future that every window before it is over."""
        time_us = self.clock_us + 4 * WINDOW_S * 1_000_000
        row = [self.books.orders, 0, CITIES[0], PRODUCTS[0], 1, 0, time_us]
        columns = [pa.array([value], kind) for value, kind in zip(row[:-1], ORDERS.types[:-1], strict=True)]
        self.books.orders += 1
        return pa.table([*columns, pa.array([time_us]).cast(_TIME)], schema=ORDERS)


def window_start(number: int) -> datetime:
    """When a window begins."""
    return datetime.fromtimestamp(_OPENS_US // 1_000_000 + number * WINDOW_S, UTC)


def differences(books: Books, sales: pa.Table) -> list[str]:
    """Where a table of sales differs from the books: missing, doubled or wrong windows; none if all is right."""
    windows = (sales.column("window_start").cast(pa.int64()).to_numpy() - _OPENS_US) // (WINDOW_S * 1_000_000)
    names = {city: number for number, city in enumerate(CITIES)}
    cities = np.array([names[city] for city in sales.column("city").to_pylist()], dtype=np.int64)
    times, counts, cents = (np.zeros_like(books.counts) for _ in range(3))
    inside = windows < len(books.counts)
    where = (windows[inside], cities[inside])
    np.add.at(times, where, 1)
    np.add.at(counts, where, sales.column("orders").to_numpy()[inside])
    np.add.at(cents, where, sales.column("amount_cents").to_numpy()[inside])
    wanted = (books.counts > 0).astype(np.int64)
    problems = [
        (times < wanted, "is missing"), (times > wanted, "is there more than once"),
        (counts != books.counts, "counts other orders"), (cents != books.cents, "has another sum"),
    ]  # fmt: skip
    found = []
    for wrong, what in problems:
        for window, city in np.argwhere(wrong).tolist():
            found.append(f"{CITIES[city]} at {window_start(window):%H:%M} {what}")
    return found
