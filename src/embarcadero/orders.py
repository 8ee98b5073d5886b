"""Orders by name and by number: parsing and display."""

from __future__ import annotations

from typing import Final

from embarcadero.errors import BadValue
from embarcadero.types import Order

ORDER_NAMES: Final = {"none": Order.NONE, "local": Order.BROKER, "total": Order.TOTAL, "strong": Order.STRONG}
"""Names for users, as an alternative to numbers."""

_NAMES: Final = {order: name for name, order in ORDER_NAMES.items()}


def parse_order(given: int | str) -> Order:
    """Parse the name or the number of an order. Raises BadValue."""
    if isinstance(given, str) and given.strip().lower() in ORDER_NAMES:
        return ORDER_NAMES[given.strip().lower()]
    number = given.strip() if isinstance(given, str) else given
    for order in Order:
        if number in (int(order), str(int(order))) and not isinstance(number, bool):
            return order
    raise BadValue(
        f"order {given!r} does not exist",
        'use "total" (2: one total order), "strong" (5: it also keeps the order of each publisher), "local" (1: an '
        'order per broker that keeps the order of each publisher) or "none" (0: an order per broker)',
    )


def order_name(order: int) -> str:
    """Return the name of an order."""
    return _NAMES[Order(order)]


def order_label(order: int) -> str:
    """Return number and name of an order, for people."""
    return f"{int(order)} ({order_name(order)})"


def session_order(topic: str, topic_order: int, asked: int | str) -> Order:
    """Check the order that a session asks for in a topic. Raises BadValue."""
    wanted, has = parse_order(asked), Order(topic_order)
    if wanted == has or (has is Order.TOTAL and wanted is Order.STRONG):
        return wanted
    allowed = '"total" or "strong"' if has is Order.TOTAL else f'"{order_name(has)}"'
    raise BadValue(
        f"topic {topic!r} has order {order_label(has)}, which does not allow sessions of order {order_label(wanted)}",
        f"use {allowed}, or omit the order",
    )
