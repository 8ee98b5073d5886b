"""The primitives of real memory: bounds, modes, and behavior without the native module."""

from __future__ import annotations

import numpy as np
import pytest

from embarcadero.errors import NotAvailable
from embarcadero.fabric import shared


def real_modes() -> list[bool]:
    """Coherent, and incoherent where this machine has the native module for it."""
    usable = shared.NATIVE is not None and not shared.NATIVE.coherent_only
    return [True, False] if usable else [True]


@pytest.mark.parametrize("coherent", real_modes())
@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize(("offset", "length"), [(0, 1000), (1, 1), (63, 2), (999, 1), (1000, 0), (0, 0)])
def test_no_byte_changes(coherent: bool, writable: bool, offset: int, length: int) -> None:
    """Flush and invalidate of any span leave every byte as it is, dirty or clean, in read-only buffers too."""
    data = np.random.default_rng(1).integers(0, 256, 1000, dtype=np.uint8)
    before = data.tobytes()
    data.flags.writeable = writable
    chosen = shared.choose(coherent)
    chosen.flush(data, offset, length)
    chosen.fence()
    chosen.invalidate(data, offset, length)
    assert data.tobytes() == before


@pytest.mark.parametrize("coherent", [coherent for coherent in real_modes() if not coherent])
@pytest.mark.parametrize(("offset", "length"), [(-1, 4), (0, -1), (0, 101), (100, 1), (2**62, 2**62), (101, 0)])
def test_spans_outside_the_buffer_are_refused(coherent: bool, offset: int, length: int) -> None:
    """The native primitives check bounds, without overflow."""
    chosen = shared.choose(coherent)
    data = np.zeros(100, dtype=np.uint8)
    for primitive in (chosen.flush, chosen.invalidate):
        with pytest.raises(ValueError, match="outside a buffer of 100 bytes"):
            primitive(data, offset, length)


@pytest.mark.parametrize("coherent", [coherent for coherent in real_modes() if not coherent])
def test_objects_without_a_buffer_are_refused(coherent: bool) -> None:
    """Objects without memory, memory with holes, and invalid numbers are typed errors, never a crash."""
    flush = shared.choose(coherent).flush
    data = np.zeros(100, dtype=np.uint8)
    with pytest.raises(TypeError):
        flush(7, 0, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        flush(data[::2], 0, 1)
    with pytest.raises(TypeError):
        flush(data, "0", 1)  # type: ignore[arg-type]
    with pytest.raises(OverflowError):
        flush(data, 0, 2**64)
    with pytest.raises(TypeError, match="buffer, offset, length"):
        flush(data, 0)  # type: ignore[call-arg]


def test_without_the_native_module_one_x86_host_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the native module a coherent x86-64 host works, and describes itself in one sentence."""
    monkeypatch.setattr(shared, "NATIVE", None)
    monkeypatch.setattr(shared, "strongly_ordered", True)
    chosen = shared.choose(coherent=True)
    chosen.flush(np.zeros(8, dtype=np.uint8), 0, 8)
    chosen.fence()
    assert "native module is missing" in shared.describe()


@pytest.mark.parametrize(("coherent", "strongly_ordered"), [(True, False), (False, True), (False, False)])
def test_without_the_native_module_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch, coherent: bool, strongly_ordered: bool
) -> None:
    """Weakly ordered processors and incoherent memory are refused without the native module, with the remedy."""
    monkeypatch.setattr(shared, "NATIVE", None)
    monkeypatch.setattr(shared, "strongly_ordered", strongly_ordered)
    with pytest.raises(NotAvailable, match="C compiler"):
        shared.choose(coherent)


class FencesOnly:
    """The native module as built for another processor."""

    coherent_only = True
    write_back = "fence"

    def flush(self, buffer: object, offset: int, length: int, /) -> None: ...
    def invalidate(self, buffer: object, offset: int, length: int, /) -> None: ...
    def fence(self) -> None: ...


def test_another_processor_gets_native_fences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weakly ordered processor uses the native fences when coherent, and refuses incoherent memory."""
    native = FencesOnly()
    monkeypatch.setattr(shared, "NATIVE", native)
    monkeypatch.setattr(shared, "strongly_ordered", False)
    assert shared.choose(coherent=True) == (native.flush, native.invalidate, native.fence)
    with pytest.raises(NotAvailable, match="x86-64"):
        shared.choose(coherent=False)


def test_descriptions_are_one_sentence() -> None:
    """`status` gets one sentence for each mode."""
    for coherent in real_modes():
        assert shared.describe(coherent).count(".") == 1
