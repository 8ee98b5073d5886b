"""The primitives of real memory, chosen for the machine and for the fabric.

Coherent (the default): all roles share one host whose caches agree. On x86-64 stores become visible in the order they
are made and loads happen in order, so flush and invalidate have nothing to do (a Python call already keeps the
interpreter from reordering); only the full fence is real. Dropping lines for real would empty the cache for nothing.

Incoherent (memory shared by several hosts): real write-back and drop of cache lines by the native module.
"""

from __future__ import annotations

import importlib
import platform
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from embarcadero.errors import NotAvailable
from embarcadero.fabric.region import Bytes

SpanPrimitive = Callable[[Bytes, int, int], None]


class Native(Protocol):
    """What the C module offers (native/primitives.c)."""

    coherent_only: bool
    write_back: str

    def flush(self, buffer: Bytes, offset: int, length: int, /) -> None: ...
    def invalidate(self, buffer: Bytes, offset: int, length: int, /) -> None: ...
    def fence(self) -> None: ...


class Primitives(NamedTuple):
    """Flush and invalidate a span of a buffer; fence."""

    flush: SpanPrimitive
    invalidate: SpanPrimitive
    fence: Callable[[], None]


def _load_native() -> Native | None:
    try:
        return cast(Native, importlib.import_module("embarcadero.fabric._native"))
    except ImportError:
        return None


NATIVE = _load_native()
native_available = NATIVE is not None
strongly_ordered = platform.machine() in ("x86_64", "AMD64")

_BUILD_HINT = "install a C compiler and Python's headers, then install embarcadero again"
_fence_lock = threading.Lock()


def ordered_by_hardware(buffer: Bytes, offset: int, length: int) -> None:
    """Nothing: coherent x86-64 memory keeps the order of stores and the order of loads."""


def _fence_by_lock() -> None:
    """Taking a lock is an atomic read-modify-write, which x86-64 makes a full fence."""
    with _fence_lock:
        pass


def choose(coherent: bool) -> Primitives:
    """The primitives for a fabric; NotAvailable when this machine cannot do it."""
    if coherent and strongly_ordered:
        return Primitives(ordered_by_hardware, ordered_by_hardware, NATIVE.fence if NATIVE else _fence_by_lock)
    if NATIVE is None:
        problem = "on this processor" if coherent else "with incoherent memory"
        raise NotAvailable(f"the native module is needed {problem}, and it is missing", _BUILD_HINT)
    if not coherent and NATIVE.coherent_only:
        raise NotAvailable("incoherent memory needs an x86-64 processor", "run all roles on one coherent host")
    return Primitives(NATIVE.flush, NATIVE.invalidate, NATIVE.fence)


def describe(coherent: bool = True) -> str:
    """One sentence about what the fabric does on this machine, for `status`."""
    if NATIVE is None:
        return "All roles must share one coherent x86-64 host: the native module is missing."
    if coherent:
        return "All roles share one coherent host; cache lines are left alone."
    return f"Memory is taken as incoherent; cache lines are written back with {NATIVE.write_back}."
