"""Changes to values of JSON and msgpack: another type, another size, a missing or an extra key."""

from __future__ import annotations

from random import Random
from typing import Any, Final

import msgspec

from embarcadero_proof.fuzz.mutate import NUMBERS, mutated
from embarcadero_proof.fuzz.target import Inputs, Mutate

_LONG: Final = 5_000
_OTHERS: Final[tuple[Any, ...]] = (
    None, True, False, -1, -(1 << 63), 0.0, -0.5, 1e308, float("inf"), "", "x", "\0", "é" * 40, "../..", "9" * _LONG,
    b"", b"\xff" * 9, [], {}, [[]] * 9, {"": None}, [None] * 40,
)  # fmt: skip
_DEEP: Final = 600


def changed(value: Any, rng: Random) -> Any:
    """Return the value with one change somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        copy = dict(value)
        key = rng.choice(list(copy))
        choice = rng.random()
        if choice < 0.12:
            del copy[key]
        elif choice < 0.2:
            copy[rng.choice(("", "x", key))] = copy.pop(key)
        elif choice < 0.25:
            copy[rng.choice(("x", "type", 7))] = _other(rng)
        else:
            copy[key] = changed(copy[key], rng)
        return copy
    if isinstance(value, list) and value and rng.random() < 0.85:
        items = list(value)
        at = rng.randrange(len(items))
        choice = rng.random()
        if choice < 0.15:
            del items[at]
        elif choice < 0.3:
            items[at:at] = [items[at]] * rng.choice((1, 2, 50))
        else:
            items[at] = changed(items[at], rng)
        return items
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.7:
        return value + rng.randint(-3, 3) if rng.random() < 0.4 else rng.choice(NUMBERS)
    if isinstance(value, str) and rng.random() < 0.5:
        return mutated(value.encode(), rng, [b"x"]).decode(errors="replace")
    return _other(rng)


def _other(rng: Random) -> Any:
    if rng.random() < 0.04:
        deep: Any = []
        for _ in range(_DEEP):
            deep = [deep]
        return deep
    return rng.choice(NUMBERS) if rng.random() < 0.4 else rng.choice(_OTHERS)


def tree_mutation(codec: Any) -> Mutate:
    """Return a mutation for inputs of `msgspec.json` or `msgspec.msgpack`: mostly of values, sometimes of bytes."""

    def mutate(data: bytes, rng: Random, pool: Inputs) -> bytes:
        if rng.random() < 0.25:
            return mutated(data, rng, pool)
        try:
            value = codec.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return mutated(data, rng, pool)
        for _ in range(1 + (rng.random() < 0.3)):
            value = changed(value, rng)
        try:
            return bytes(codec.encode(value))
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
            return mutated(data, rng, pool)

    return mutate
