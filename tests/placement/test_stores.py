"""A store is opened by its URL, in one place."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from embarcadero.errors import BadValue
from embarcadero.placement.store import MemoryStore, Put, SqliteStore, open_store


@pytest.mark.parametrize("form", ["{}", "sqlite://{}"])
def test_a_path_and_a_url_open_the_same_file(form: str, tmp_path: Path) -> None:
    """A value written through one is read through the other."""
    path = tmp_path / "store.db"
    with closing(open_store(path)) as store:
        store.transact([], [Put("key", b"value")])
    with closing(open_store(form.format(path))) as store:
        assert isinstance(store, SqliteStore)
        found = store.get("key")
    assert found is not None
    assert found.value == b"value"


def test_a_store_in_memory_is_empty() -> None:
    """Each is a store of its own."""
    first, second = open_store("memory:"), open_store("memory:")
    assert isinstance(first, MemoryStore)
    first.transact([], [Put("key", b"value")])
    assert second.list("") == []


@pytest.mark.parametrize("url", ["etcd://a:2379", "sqlite:store.db", "sqlite:///", "memory:x", "http://a/b"])
def test_an_unknown_url_is_refused_with_the_supported_forms(url: str) -> None:
    """The error names the URL; the hint lists the supported forms."""
    with pytest.raises(BadValue) as refused:
        open_store(url)
    assert url in refused.value.message
    assert "sqlite:///" in refused.value.hint


def test_a_file_name_with_a_colon_is_a_path(tmp_path: Path) -> None:
    """A folder may have any name."""
    folder = tmp_path / "a:b"
    folder.mkdir()
    with closing(open_store(folder / "store.db")):
        assert (folder / "store.db").is_file()
