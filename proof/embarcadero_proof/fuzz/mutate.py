"""Changes to plain bytes: bits, numbers, chunks, splices of two inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from embarcadero_proof.fuzz.target import INPUT_BYTES_MAX

NUMBERS: Final = (
    0, 1, 2, 3, 7, 8, 16, 31, 32, 63, 64, 65, 127, 128, 255, 256, 1_000, 4_095, 4_096, 65_535, 65_536, 1 << 20,
    (1 << 24) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
)  # fmt: skip
"""Numbers at which decoders tend to fail."""
_CHUNK_MAX: Final = 512
_STACKED_MAX: Final = 5


def mutated(data: bytes, rng: Random, pool: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """Apply some changes, one after another."""
    changed = bytearray(data)
    for _ in range(min(_STACKED_MAX, 1 + int(rng.expovariate(0.8)))):
        change = rng.choice(_CHANGES)
        if words and rng.random() < 0.3:
            _insert(changed, rng, rng.choice(words))
        elif change is _splice:
            _splice(changed, rng, rng.choice(pool))
        elif changed:
            change(changed, rng)
        else:
            _insert(changed, rng, rng.randbytes(rng.randrange(1, 9)))
    return bytes(changed[:INPUT_BYTES_MAX])


def _span(size: int, rng: Random, most: int = _CHUNK_MAX) -> tuple[int, int]:
    start = rng.randrange(size)
    return start, min(size, start + 1 + int(rng.expovariate(1 / 16)) % most)


def _flip(data: bytearray, rng: Random) -> None:
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set(data: bytearray, rng: Random) -> None:
    data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _number(data: bytearray, rng: Random) -> None:
    """Overwrite a number of 2, 4 or 8 bytes, mostly an aligned one, sometimes with a small difference."""
    width = rng.choice((2, 4, 4, 8, 8))
    if len(data) < width:
        return _set(data, rng)
    at = rng.randrange(len(data) - width + 1)
    at -= at % width if rng.random() < 0.8 else 0
    order = "little" if rng.random() < 0.85 else "big"
    old = int.from_bytes(data[at : at + width], order)  # type: ignore[arg-type]
    new = old + rng.randint(-9, 9) if rng.random() < 0.4 else rng.choice(NUMBERS)
    data[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, order)  # type: ignore[arg-type]
    return None


def _delete(data: bytearray, rng: Random) -> None:
    start, stop = _span(len(data), rng)
    del data[start:stop]


def _repeat(data: bytearray, rng: Random) -> None:
    start, stop = _span(len(data), rng)
    _insert(data, rng, bytes(data[start:stop]) * rng.choice((1, 1, 1, 2, 8)))


def _noise(data: bytearray, rng: Random) -> None:
    start, stop = _span(len(data), rng, 64)
    data[start:stop] = rng.randbytes(stop - start)


def _zeros(data: bytearray, rng: Random) -> None:
    start, stop = _span(len(data), rng)
    data[start:stop] = bytes(stop - start)


def _swap(data: bytearray, rng: Random) -> None:
    start, stop = _span(len(data), rng)
    other = rng.randrange(len(data))
    data[other : other + stop - start] = data[start:stop]


def _truncate(data: bytearray, rng: Random) -> None:
    del data[rng.randrange(len(data)) :]


def _splice(data: bytearray, rng: Random, other: bytes) -> None:
    """Insert a part of another input, or replace the rest with it."""
    if not other:
        return
    if rng.random() < 0.5:
        data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other)) :]
    else:
        start, stop = _span(len(other), rng)
        _insert(data, rng, other[start:stop])


def _insert(data: bytearray, rng: Random, content: bytes) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = content


_CHANGES: Final[tuple[Callable[..., None], ...]] = (
    _flip, _flip, _set, _number, _number, _number, _number, _delete, _repeat, _noise, _zeros, _swap, _truncate, _splice,
)  # fmt: skip
