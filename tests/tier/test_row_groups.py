"""Memory that readers of tables need: bounded by the decoded size of columns, not by their encoded size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embarcadero.client.encoding import encoded
from embarcadero.client.results import Batch
from embarcadero.errors import NotAvailable
from embarcadero.limits import MIB, TABLE_PIECE_BYTES, TIER_GROUP_DECODED_BYTES
from embarcadero.tier import parquet
from embarcadero.tier.parquet import FileSpan, SpanFooter, read_footer, write_span
from embarcadero.tier.row_groups import GroupCache, pieces
from embarcadero.tier.snapshots import LoadedTable
from embarcadero.tier.storage import Storage, TierSettings
from embarcadero.tier.table import TierTable
from embarcadero.tier.table_reads import TopicTable, table_batches
from embarcadero.types import Tier
from embarcadero.wire.schemas import TopicSchemas
from tests.tier.entries import batch_of
from tests.tier.rewriting import compact

TEXT = TopicSchemas(pa.schema([("text", pa.string())]), (1,))
NESTED = TopicSchemas(
    pa.schema([
        ("all", pa.list_(pa.string())), ("by", pa.map_(pa.string(), pa.string())),
        ("one", pa.struct([("a", pa.binary()), ("b", pa.list_(pa.string()))])), ("price", pa.int64()),
    ]),
    (1,),
)  # fmt: skip


def log_of(schemas: TopicSchemas, rows: list[Any], batches: int) -> list[Batch]:
    """Batches with the same rows, compressed: a few KiB each, whatever they decode to."""
    data = pa.RecordBatch.from_pylist(rows, schema=schemas.newest)
    payload = bytes(encoded(data, "zstd"))
    count = data.num_rows
    return [batch_of(data, number, number * count, schemas, payload) for number in range(batches)]


def tiered(folder: Path, schemas: TopicSchemas, log: list[Batch]) -> LoadedTable:
    """A table with these batches in one file. The caller's list is not changed."""
    table = TierTable(TierSettings.local(folder), "t")
    made = table.create("t", "1", schemas)
    end = log[-1].index + 1, log[-1].seq + log[-1].count
    span = FileSpan(lane=0, start=0, stop=end[0], start_seq=0, stop_seq=end[1])
    facts = write_span(table.storage, made.table.location(), span, 1, schemas, [list(log)], made.entries_location)
    return table.commit({}, [facts], {0: end}, {0: (0, 0)}, schemas, 1)


def compacted(folder: Path) -> LoadedTable:
    """The same table after another program wrote its rows again, with dictionaries for all columns."""
    table = TierTable(TierSettings.local(folder), "t")
    now = table.load()
    assert now is not None
    compact(now.table)
    again = table.load()
    assert again is not None
    return again


def cold(loaded: LoadedTable, **options: Any) -> TopicTable:
    tier = Tier(id="1", warehouse="", table="t", metadata=loaded.metadata, frontiers=loaded.frontiers)
    return TopicTable(tier, **options)


def file_of(folder: Path) -> Path:
    (path,) = folder.rglob("data/*.parquet")
    return path


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files as they used to be: a row group has as many payloads as fit, whatever they decode to."""
    monkeypatch.setattr(parquet, "TIER_GROUP_DECODED_BYTES", 1 << 62)
    seal = SpanFooter.seal
    monkeypatch.setattr(SpanFooter, "seal", lambda self: seal(self).replace('"decoded":', '"other":'))
    monkeypatch.setattr(parquet, "payload_crc", lambda _: 0)


def peaks(found: Iterator[Any]) -> list[int]:
    """Memory that Arrow holds, above the amount before, each time that there is a piece."""
    before = pa.total_allocated_bytes()
    return [pa.total_allocated_bytes() - before for _ in found]


def test_row_groups_are_bounded_by_their_decoded_size(tmp_path: Path) -> None:
    """20 batches of 10 MB each, of a few KiB compressed. They were one row group of 200 MB."""
    tiered(tmp_path, TEXT, log_of(TEXT, [{"text": "x" * 1_000}] * 10_000, 20))
    found = pq.ParquetFile(file_of(tmp_path))
    footer = read_footer(found, str(file_of(tmp_path)))
    assert footer is not None
    assert found.num_row_groups == len(footer.decoded) > 5
    for number, size in enumerate(footer.decoded):
        group = found.read_row_group(number)
        assert group.nbytes <= size * 1.1
        assert size <= TIER_GROUP_DECODED_BYTES


def test_a_written_batch_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan gives thousands of compressed batches at once: decoded, they would not fit."""
    lists = [log_of(TEXT, [{"text": "x" * 1_000}] * 10_000, 20)]
    span = FileSpan(lane=0, start=0, stop=20, start_seq=0, stop_seq=200_000)
    (tmp_path / "data").mkdir()
    held, make_rows = list[int](), parquet.rows
    before = pa.total_allocated_bytes()

    def watched(*arguments: Any, **options: Any) -> pa.RecordBatch:
        held.append(pa.total_allocated_bytes() - before)
        return make_rows(*arguments, **options)

    monkeypatch.setattr(parquet, "rows", watched)
    write_span(Storage({}), f"file://{tmp_path}", span, 1, TEXT, lists)
    assert len(held) == 20
    assert max(held) < 100 * MIB


@pytest.mark.usefixtures("older")
def test_older_files_are_read_in_pieces(tmp_path: Path) -> None:
    """A row group of 2 MB that decodes to 200 MB: readers hold its dictionary, and one piece of whole batches."""
    loaded = tiered(tmp_path, TEXT, log_of(TEXT, [{"text": "x" * 1_000}] * 10_000, 20))
    assert pq.ParquetFile(file_of(tmp_path)).num_row_groups == 1
    cache = GroupCache()
    table = cold(loaded, cache=cache)
    assert max(peaks(table.rows(0, 0, 99))) < 64 * MIB
    assert 0 < cache.bytes < 64 * MIB
    sizes = [rows.column("text").nbytes for rows in table.rows(0, 0, 99)]
    assert max(sizes) <= TABLE_PIECE_BYTES
    found = [batch for batches in table_batches(table, 0, 0, 99, TEXT) for batch in batches]
    assert [(batch.index, batch.count) for batch in found] == [(number, 10_000) for number in range(20)]
    assert set(found[-1].to_arrow().column("text").to_pylist()) == {"x" * 1_000}
    assert [rows.num_rows for rows in table.rows(0, 7, 8)] == [10_000]


def test_an_oversized_row_group_is_refused_with_its_size(tmp_path: Path) -> None:
    """Equal numbers in lists are a few bytes in a file: they are counted, and nothing is read."""
    schemas = TopicSchemas(pa.schema([("prices", pa.list_(pa.int64()))]), (1,))
    tiered(tmp_path, schemas, log_of(schemas, [{"prices": [7] * 10_000}] * 10, 40))
    loaded = compacted(tmp_path)
    (file,) = cold(loaded).files(0, 0, 99)
    assert file.bytes < MIB
    with pytest.raises(NotAvailable, match="row group 0"):
        list(cold(loaded, group_bytes_max=16 * MIB).rows(0, 0, 99))
    assert sum(rows.num_rows for rows in cold(loaded, group_bytes_max=64 * MIB).rows(0, 0, 99)) == 400


def test_texts_within_lists_maps_and_structs_count_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pieces are, batches stay whole; none is cut, not even a batch that is larger than a piece."""
    rows: list[Any] = [
        {"all": ["x" * 700, None], "by": {"k": "v" * 500}, "one": {"a": b"y" * 900, "b": ["z" * 300]}, "price": 1},
        {"all": None, "by": None, "one": None, "price": None},
        {"all": [], "by": {}, "one": {"a": None, "b": []}, "price": 3},
    ]
    log = log_of(NESTED, rows * 100, 12)
    tiered(tmp_path, NESTED, log)
    loaded = compacted(tmp_path)
    for bytes_max, many in ((1, 12), (500_000, 6), (1 << 40, 1)):
        monkeypatch.setattr("embarcadero.tier.table_reads.TABLE_PIECE_BYTES", bytes_max)
        table = cold(loaded)
        assert len(list(table.rows(0, 0, 99))) == many
        found = [batch for batches in table_batches(table, 0, 0, 99, NESTED) for batch in batches]
        assert [batch.to_arrow().to_pylist() for batch in found] == [batch.to_arrow().to_pylist() for batch in log]


def test_pieces_of_nothing_and_of_plain_columns() -> None:
    """Columns that are not copied are not cut."""
    plain = pa.table({"_index": pa.array([1, 1, 2], pa.int64()), "text": ["a", "b", "c"]})
    assert [part.num_rows for part in pieces(plain, 1)] == [3]
    assert list(pieces(plain.slice(0, 0), 1)) == []
    coded = plain.set_column(1, "text", plain.column("text").dictionary_encode())
    assert [part.num_rows for part in pieces(coded, 1)] == [2, 1]
    assert [part.num_rows for part in pieces(coded.slice(1), 1)] == [1, 1]
