"""The fast payload of one record equals the payload that Arrow makes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embarcadero.wire import schemas
from embarcadero.wire.schemas import RAW_SCHEMA, decode_batch, encode_batch, lone_payload, plain_batch

times = st.floats(-6e10, 2.5e11, allow_nan=False)


@given(st.binary(max_size=300), times)
@settings(deadline=None, max_examples=300)
def test_same_bytes_as_arrow(value: bytes, time_s: float) -> None:
    """Any value and any time give the very bytes that Arrow would have written."""
    assert lone_payload(value, time_s) == encode_batch(plain_batch([value], [time_s])).to_pybytes()


@pytest.mark.parametrize("size", [0, 7, 8, 9, 4095, 4096, 65_537, 4 << 20])
def test_large_values(size: int) -> None:
    """The numbers in the head hold for any length, up to the largest record."""
    payload = lone_payload(bytes(size), 1.5)
    assert payload == encode_batch(plain_batch([bytes(size)], [1.5])).to_pybytes()
    assert decode_batch(payload, RAW_SCHEMA, 1, full=True).column(1)[0].as_py() == bytes(size)


def test_without_a_known_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Arrow lays out such a payload in a way that was not expected, Arrow encodes."""
    monkeypatch.setattr(schemas, "_form", lambda: None)
    assert lone_payload(b"value", 2.5) == encode_batch(plain_batch([b"value"], [2.5])).to_pybytes()


def test_the_form_is_known() -> None:
    """This release of Arrow is one whose layout we know, or being quick would be lost unseen."""
    assert schemas._form() is not None
