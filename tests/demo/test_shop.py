"""The demo's shop: the books match the published orders, and a wrong table of sales is noticed."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from embarcadero.demo.shop import LATE_S, ORDERS, SALES, WINDOW_S, Books, Shop, differences


def _day(steps: int = 40) -> tuple[Books, pa.Table, pa.Table]:
    shop = Shop(seed=7)
    told = [shop.step(200) for _ in range(steps)]
    return shop.books, pa.concat_tables([orders for orders, _ in told]), pa.concat_tables([paid for _, paid in told])


def _sales(orders: pa.Table) -> pa.Table:
    seconds = pc.divide(orders.column("event_time").cast(pa.int64()), 1_000_000)
    starts = pc.multiply(pc.multiply(pc.divide(seconds, WINDOW_S), WINDOW_S), 1_000_000).cast(SALES.field(0).type)
    grouped = (
        orders.append_column("window_start", starts)
        .group_by(["window_start", "city"])
        .aggregate([("amount_cents", "count"), ("amount_cents", "sum")])
    )
    return grouped.rename_columns(SALES.names)


def test_the_books_match_the_published_orders() -> None:
    """Summed in another way, the orders give the totals of the books; some are late, none by more than allowed."""
    books, orders, payments = _day()
    assert orders.schema == ORDERS
    assert orders.num_rows == books.orders == books.counts.sum()
    assert payments.num_rows == books.payments
    assert pc.sum(payments.column("amount_cents")).as_py() == books.paid_cents
    assert differences(books, _sales(orders)) == []
    assert 0 < books.late < books.orders / 10
    times = orders.column("event_time").cast(pa.int64()).to_numpy()
    assert (times >= times[0] - LATE_S * 1_000_000).all()


def test_the_same_seed_is_the_same_day() -> None:
    """A day can be replayed."""
    assert _day(3)[1].equals(_day(3)[1])


@pytest.mark.parametrize("what", ["missing", "more than once", "wrong sum", "wrong number of orders"])
def test_a_wrong_table_is_noticed(what: str) -> None:
    """A window that is lost, duplicated, or has a different sum is named."""
    books, orders, _ = _day()
    sales = _sales(orders)
    if what == "missing":
        sales = sales.slice(1)
    elif what == "more than once":
        sales = pa.concat_tables([sales, sales.slice(0, 1)])
    else:
        name = "amount_cents" if what == "wrong sum" else "orders"
        number = sales.schema.get_field_index(name)
        sales = sales.set_column(number, name, pc.add(sales.column(name), 1))
    assert any(what in problem for problem in differences(books, sales))
