"""Files, commits and cold reads: every entry once, on top of the correct snapshot; damage is named, never served."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embarcadero.client.results import Batch
from embarcadero.config.secrets import parse_properties
from embarcadero.errors import BadTable, BadValue, Corrupt, Deposed, TierUnavailable, Trimmed
from embarcadero.tier.columns import EntriesHash, rows
from embarcadero.tier.parquet import FileFacts, FileSpan, SpanFooter, span_of, write_span
from embarcadero.tier.snapshots import LoadedTable
from embarcadero.tier.storage import Storage, TierSettings
from embarcadero.tier.table import TierTable, collect_data, collect_metadata, table_name
from embarcadero.tier.table_reads import TopicTable, table_batches
from embarcadero.types import EntryKind, GapKind, Tier
from embarcadero.wire.schemas import RAW, TopicSchemas
from embarcadero_proof.bugs.table import injected
from tests.tier.entries import batch_of, control_of, hole, raw

LOG = [
    control_of(0, 0, EntryKind.SESSION_OPEN, session=1, session_seq=2**64 - 5),
    batch_of(raw([b"a", b"b"], [b"k", None]), 1, 0, partition=2),
    batch_of(raw([b"c"]), 2, 2),
    hole(3, 9),
    control_of(9, 50, EntryKind.SKIP, session=3, session_seq=8, location=5),
    batch_of(raw([b"x", b"y", b"z"]), 10, 50),
    batch_of(raw([b"bad"] * 2), 11, 53, payload=b"\1" * 72),
    control_of(12, 55, EntryKind.SESSION_CLOSE, session=1),
]
ALL = FileSpan(lane=0, start=0, stop=13, start_seq=0, stop_seq=55)
FIRST = FileSpan(lane=0, start=0, stop=3, start_seq=0, stop_seq=3)
REST = FileSpan(lane=0, start=3, stop=13, start_seq=3, stop_seq=55)


@pytest.fixture
def table(tmp_path: Path) -> TierTable:
    made = TierTable(TierSettings.local(tmp_path), "orders")
    assert made.load() is None
    made.create("orders", "id-1", RAW)
    return made


@pytest.fixture
def inject() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(injected(name))


def write(table: TierTable, span: FileSpan, log: list[Batch], schemas: TopicSchemas = RAW, epoch: int = 1) -> FileFacts:
    now = table.load()
    assert now is not None
    scan = [log[:2], log[2:]]
    return write_span(table.storage, now.table.location(), span, epoch, schemas, scan, now.entries_location)


def commit(table: TierTable, facts: FileFacts, schemas: TopicSchemas = RAW) -> LoadedTable:
    span, now = facts.span, table.load()
    assert now is not None
    before = {} if span.start == 0 else {span.lane: (span.start, span.start_seq)}
    return table.commit(before, [facts], {span.lane: (span.stop, span.stop_seq)}, {span.lane: (0, 0)}, schemas, 1)


def now_of(table: TierTable) -> LoadedTable:
    now = table.load()
    assert now is not None
    return now


def tier_of(loaded: LoadedTable, **more: Any) -> Tier:
    facts = {"id": loaded.id, "warehouse": "", "table": "orders", "metadata": loaded.metadata}
    return Tier(**{**facts, "frontiers": loaded.frontiers, "starts": loaded.starts, **more})


def cold(loaded: LoadedTable, **more: Any) -> TopicTable:
    return TopicTable(tier_of(loaded, **more))


def taken(table: TopicTable, schemas: TopicSchemas = RAW, start: int = 0, stop: int = 99, **more: Any) -> list[Batch]:
    return [batch for batches in table_batches(table, 0, start, stop, schemas, **more) for batch in batches]


def facts_of(batch: Batch) -> tuple[Any, ...]:
    names = "lane index seq count session session_seq broker partition append_us gap kind crc size schema_version"
    return tuple(getattr(batch, name) for name in names.split() if batch.kind is not None or name in ("lane", "gap"))


def test_a_table_has_the_batches_of_the_brokers(table: TierTable) -> None:
    """Batches, control entries, skips, holes; positions, sessions, checksums; and the records themselves."""
    commit(table, write(table, FIRST, LOG[:3]))
    found = taken(cold(commit(table, write(table, REST, LOG[3:]))), control=True)
    assert [facts_of(batch) for batch in found] == [facts_of(batch) for batch in LOG]
    for batch, was in zip(found, LOG, strict=True):
        if batch.index != 11:
            assert batch.to_arrow().equals(was.to_arrow())
    assert [record.value for record in found[1].records()] == [b"a", b"b"]
    with pytest.raises(Corrupt, match="not a record batch"):
        found[6].to_arrow()
    assert bytes(found[6].payload) == b"\1" * 72
    assert len(bytes(found[1].payload)) > 0


def test_spans_partitions_and_starts(table: TierTable) -> None:
    """Only the requested partitions, each index once. Below the start is trimmed, above the frontier is missing."""
    loaded = commit(table, write(table, ALL, LOG))
    assert [b.index for b in taken(cold(loaded), start=2, stop=11)] == [2, 3, 9, 10]
    assert [b.index for b in taken(cold(loaded), partitions={2})] == [1, 3, 9]
    trimmed = taken(cold(loaded, starts={0: (2, 2)}))
    assert trimmed[0].gap == (GapKind.TRIMMED, 0, 2, trimmed[0].gap.session)  # type: ignore[union-attr]
    assert trimmed[1].index == 2
    assert [b.index for b in taken(cold(loaded, frontiers={0: (10, 50)}))][-1] == 9
    lost = taken(cold(loaded, frontiers={0: (30, 90)}))[-1].gap
    assert lost is not None
    assert (lost.kind, lost.start, lost.stop) == (GapKind.LOST, 13, 30)
    assert taken(TopicTable(Tier(id="", warehouse="", table=""))) == []


def test_positions_in_a_table(table: TierTable) -> None:
    """By index, by seq (the batch that holds it), by time; nothing above the frontier."""
    commit(table, write(table, FIRST, LOG[:3]))
    found = cold(commit(table, write(table, REST, LOG[3:])))
    assert [found.find(0, "seq", seq) for seq in (0, 1, 2, 3, 51, 55)] == [
        (1, 0),
        (1, 0),
        (2, 2),
        (10, 50),
        (10, 50),
        None,
    ]
    assert [found.find(0, "index", index) for index in (0, 5, 12, 13)] == [(0, 0), (9, 50), (12, 55), None]
    assert found.find(0, "time", 1_700_000_000_000_003) == (9, 50)
    assert [file.stop_seq for file in found.files(0, 0, 99)] == [3, 55]
    assert [(file.first_index, file.stop_index) for file in found.files(0, 3, 10)] == [(3, 13)]
    assert (found.position_after(0, 1), found.position_after(0, 4)) == ((3, 3), (13, 55))
    with pytest.raises(BadValue, match="the table has no column price"):
        list(found.rows(0, 0, 9, ["price"]))


def test_an_independent_engine_agrees(table: TierTable) -> None:
    """DuckDB over the Parquet files sees the rows of the log, and their hash is that of the entries."""
    files = [write(table, FIRST, LOG[:3]), write(table, REST, LOG[3:])]
    commit(table, files[0])
    commit(table, files[1])
    paths = [facts.paths[0].removeprefix("file://") for facts in files]
    query = "select _seq, value from read_parquet(?) where value is not null order by _index, _seq"
    assert duckdb.execute(query, [paths]).fetchall() == [
        (0, b"a"), (1, b"b"), (2, b"c"), (50, b"x"), (51, b"y"), (52, b"z"),
    ]  # fmt: skip
    whole, parts = EntriesHash(), EntriesHash()
    whole.add(rows(0, LOG, RAW, control=True))
    parts.add(rows(0, LOG[:3], RAW, control=True))
    footer = cold(now_of(table)).footer(files[0].paths[0])
    assert footer is not None
    assert (footer.hash, footer.entries) == (parts.hex, 3)
    table_rows = EntriesHash()
    for batch in cold(now_of(table)).rows(0, 0, 99):
        table_rows.add(batch)
    assert table_rows.hex == whole.hex


def test_later_columns_are_null_in_older_files(table: TierTable, tmp_path: Path) -> None:
    """The table gets the column with the first file that has it; readers of either version read both files."""
    price, note = pa.field("price", pa.uint64()), pa.field("note", pa.large_string())
    old, new = TopicSchemas(pa.schema([price]), (1,)), TopicSchemas(pa.schema([price, note]), (1, 2))
    typed = TierTable(TierSettings.local(tmp_path / "typed"), "ticks")
    typed.create("ticks", "id-2", old)
    first = batch_of(pa.record_batch({"price": pa.array([2**64 - 1], pa.uint64())}), 0, 0, old)
    second = batch_of(
        pa.record_batch([pa.array([7], pa.uint64()), pa.array(["x"], note.type)], schema=new.newest), 1, 1, new
    )
    spans = [FileSpan(lane=0, start=n, stop=n + 1, start_seq=n, stop_seq=n + 1) for n in range(2)]
    commit(typed, write(typed, spans[0], [first], old), old)
    loaded = commit(typed, write(typed, spans[1], [second], new), new)
    found = [batch.to_arrow() for batch in taken(cold(loaded), new)]
    assert [batch.column("price").to_pylist() for batch in found] == [[2**64 - 1], [7]]
    assert [batch.column("note").to_pylist() for batch in found] == [[None], ["x"]]
    assert all(batch.schema == new.newest for batch in found)
    assert [batch.to_arrow().schema for batch in taken(cold(loaded), old)] == [old.newest] * 2
    scanned = loaded.table.scan().to_arrow()
    assert scanned.column("note").to_pylist() == ["x", None] or scanned.column("note").to_pylist() == [None, "x"]


# --- who may commit ---------------------------------------------------------------------------------------------------
def test_a_commit_is_on_top_of_its_plan(table: TierTable, inject: Any) -> None:
    """Another plan's files are refused, and nothing changes. Without the rule the rows would be there twice."""
    commit(table, write(table, ALL, LOG))
    late = write(table, ALL, LOG, epoch=2)
    with pytest.raises(Deposed, match="not at"):
        commit(table, late)
    assert count(table) == 8
    inject("tier-blind-commit")
    commit(table, late)
    assert count(table) == 16


def test_one_of_two_tierers_commits(table: TierTable, tmp_path: Path, inject: Any) -> None:
    """The second one's commit comes between the first one's check and its swap.

    The first gets an error, and no row is there twice. With PyIceberg's own retries every row would be.
    """
    mine, theirs = write(table, ALL, LOG), write(table, ALL, LOG, epoch=2)
    other = TierTable(table.settings, "orders")
    interrupt(table, lambda: commit(other, theirs))
    with pytest.raises(Deposed, match="came first"):
        commit(table, mine)
    assert count(other) == 8
    assert set(collect_data(other)) == {path.rsplit("/", 1)[-1] for path in (*mine.paths, mine.entries_path)}

    inject("tier-commit-retries")
    table = TierTable(TierSettings.local(tmp_path / "retries"), "orders")
    loaded = table.create("orders", "id-1", RAW)
    for each in (loaded.table, table.entries(loaded).load()):
        with each.transaction() as transaction:
            transaction.remove_properties("commit.retry.num-retries")
    mine, theirs = write(table, ALL, LOG), write(table, ALL, LOG, epoch=2)
    other = TierTable(table.settings, "orders")
    interrupt(table, lambda: commit(other, theirs))
    commit(table, mine)
    assert count(other) == 16


def interrupt(table: TierTable, then: Any) -> None:
    """Run a function just before the next commit reaches the catalog."""
    catalog: Any = table.catalog()
    swap = catalog.commit_table

    def commit_table(*arguments: Any) -> Any:
        catalog.commit_table = swap
        then()
        return swap(*arguments)

    catalog.commit_table = commit_table


def count(table: TierTable) -> int:
    now = table.load()
    assert now is not None
    return int(now.table.scan().to_arrow().num_rows)


def test_someone_elses_retries_are_switched_off(table: TierTable) -> None:
    """A table whose property was changed gets it back before the next commit."""
    now = table.load()
    assert now is not None
    with now.table.transaction() as transaction:
        transaction.set_properties({"commit.retry.num-retries": "4"})
    assert commit(table, write(table, ALL, LOG)).table.properties["commit.retry.num-retries"] == "0"


def test_a_table_of_another_topic(table: TierTable) -> None:
    """It is recognized by its id, not by its name."""
    with pytest.raises(BadTable, match="does not belong to topic 'orders'"):
        table.create("orders", "id-2", RAW)
    assert [table_name(topic) for topic in ("orders", "a.b-C")] == ["orders", "a_b_c"]


# --- garbage ----------------------------------------------------------------------------------------------------------
def test_only_files_that_can_never_be_committed_are_garbage(table: TierTable) -> None:
    """Files of attempts below the frontier are removed; those of possible commits, and of other programs, stay."""
    orphan, ahead = write(table, FIRST, LOG[:3]), write(table, REST, LOG[3:])
    folder = Path(orphan.paths[0].removeprefix("file://")).parent
    (folder / "notes.parquet").write_bytes(b"not ours")
    assert collect_data(table) == []
    commit(table, write(table, FIRST, LOG[:3], epoch=2))
    (folder / orphan.paths[0].rsplit("/", 1)[-1].replace("-1-", "-9-")).write_bytes(b"half a file")
    gone = collect_data(table)
    assert {orphan.paths[0].rsplit("/", 1)[-1], orphan.entries_path.rsplit("/", 1)[-1]} < set(gone)
    assert len(gone) == 3
    commit(table, ahead)
    assert collect_data(table) == []
    assert sorted(path.name for path in folder.iterdir())[-1] == "notes.parquet"
    assert len(taken(cold(now_of(table)))) == 6


def test_old_unreferenced_metadata_is_garbage(table: TierTable) -> None:
    """Leftovers of a crash between writing manifests and the commit; recent files stay."""
    loaded = commit(table, write(table, ALL, LOG))
    for metadata in (loaded.metadata, loaded.entries):
        folder = Path(metadata.removeprefix("file://")).parent
        (folder / "left-m0.avro").write_bytes(b"left")
    assert collect_metadata(table, loaded, time.time()) == []
    assert collect_metadata(table, loaded, time.time() + 7_200) == ["left-m0.avro"] * 2
    assert len(taken(cold(loaded))) == 6


# --- damage -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("which", ["records", "entries"])
def test_a_missing_file_is_named(table: TierTable, which: str) -> None:
    """Data files, and the metadata file itself."""
    facts = write(table, ALL, LOG)
    loaded = commit(table, facts)
    path = facts.paths[0] if which == "records" else facts.entries_path
    Path(path.removeprefix("file://")).unlink()
    with pytest.raises(BadTable, match="is missing") as caught:
        taken(cold(loaded))
    assert path in caught.value.message
    with pytest.raises(BadTable, match=r"nowhere.*is missing"):
        taken(cold(loaded, metadata=f"{loaded.metadata[:-20]}nowhere.metadata.json"))


@pytest.mark.parametrize("which", ["records", "entries"])
def test_no_flipped_bit_is_served(table: TierTable, which: str) -> None:
    """Anywhere in the file: either the rows are correct, or an error names the file."""
    facts = write(table, ALL, LOG)
    loaded = commit(table, facts)
    location = facts.paths[0] if which == "records" else facts.entries_path
    path = Path(location.removeprefix("file://"))
    whole = path.read_bytes()
    reader = cold(loaded)
    right = list(reader.rows(0, 0, 99))
    noticed = 0
    for place in range(0, len(whole), 11):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            found = list(reader.rows(0, 0, 99))
        except BadTable as error:
            noticed += location in error.message
        else:
            assert pa.Table.from_batches(found).equals(pa.Table.from_batches(right))
    assert noticed > len(whole) // 11 * 0.4
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadTable, match="damaged"):
        taken(cold(loaded))


def test_foreign_values_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """Too large for the table's type: the file is named; for the topic's: the table, and the position in it."""
    wide, narrow = (TopicSchemas(pa.schema([("n", kind)]), (1,)) for kind in (pa.int32(), pa.int8()))
    table = TierTable(TierSettings.local(tmp_path), "numbers")
    table.create("numbers", "id-1", wide)
    span = FileSpan(lane=0, start=0, stop=1, start_seq=0, stop_seq=1)
    batch = batch_of(pa.record_batch({"n": pa.array([300], pa.int32())}), 0, 0, wide)
    facts = write(table, span, [batch], wide)
    loaded = commit(table, facts, wide)
    with pytest.raises(BadTable, match=r"table orders, lane 0, from index 0 on, .*300"):
        taken(cold(loaded), narrow)

    reader, theirs = cold(loaded), f"file://{tmp_path}/part-0.parquet"
    rewritten = pq.read_table(facts.paths[0]).drop_columns("n").append_column("n", pa.array([2**40]))
    pq.write_table(rewritten.replace_schema_metadata(None), tmp_path / "part-0.parquet")
    (file,) = reader.files(0, 0, 1)
    with pytest.raises(BadTable, match=f"{theirs} is damaged: .*{2**40}"):
        list(reader.file_rows(replace(file, path=theirs), 0, 1, ["n"]))


def test_an_unknown_location_is_a_typed_error() -> None:
    """A scheme without a file system."""
    with pytest.raises(BadTable, match="carrier-pigeon://coop/file is not a location") as caught:
        Storage({}).open("carrier-pigeon://coop/file")
    assert "tier.properties" in caught.value.hint


def test_a_scan_that_differs_from_the_span_makes_no_file(table: TierTable) -> None:
    """A batch that is missing, duplicated, or gone: nothing is left behind, and nothing could be committed."""
    for log in ([*LOG[:1], *LOG[2:]], [*LOG[:2], *LOG[1:]], LOG[:-1], [*LOG, batch_of(raw([b"more"]), 13, 55)]):
        with pytest.raises(Corrupt):
            write(table, ALL, log)
    with pytest.raises(Trimmed, match="were removed"):
        write(table, ALL, [hole(0, 2, GapKind.TRIMMED), *LOG[2:]])
    with pytest.raises(Trimmed):
        write(table, ALL, [*LOG[:2], hole(3, 9), *LOG[4:]])
    for name in ("orders", "orders__entries"):
        assert table.storage.list(f"{table.settings.warehouse}/embarcadero/{name}/data") == []
    empty = write(table, FileSpan(lane=0, start=3, stop=9, start_seq=3, stop_seq=50), [hole(3, 9)])
    assert (empty.paths, empty.entries_path, empty.rows, empty.written) == ([], "", 0, False)


def test_names_and_footers() -> None:
    """Names identify spans; a changed footer is noticed."""
    assert span_of("file:///w/embarcadero/t/data/0-1-5-10-50-3-0123456789abcdef.parquet") == FileSpan(
        lane=0, start=1, stop=5, start_seq=10, stop_seq=50
    )
    assert span_of("part-0.parquet") is None
    footer = SpanFooter(span=ALL, rows=1, entries=1, hash="", groups=[(0, 0, 1)], schema="")
    sealed = footer.seal().encode()
    assert SpanFooter.unseal(sealed, "f") == footer
    for place in range(len(sealed)):
        with pytest.raises(BadTable):
            SpanFooter.unseal(sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :], "f")


# --- catalogs and stores that do not answer ---------------------------------------------------------------------------
def test_a_locked_catalog_is_a_typed_error(table: TierTable) -> None:
    """Another process holds the catalog's file: nothing is committed, and trying again later succeeds."""
    facts = write(table, ALL, LOG)
    path = table.settings.properties["uri"].removeprefix("sqlite:///").partition("?")[0]
    impatient = TierTable(
        TierSettings(table.settings.warehouse, {"type": "sql", "uri": f"sqlite:///{path}?timeout=0.05"}), "orders"
    )
    impatient.catalog()
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("begin exclusive")
        with pytest.raises(TierUnavailable, match="locked"):
            commit(impatient, facts)
        other.execute("rollback")
    assert commit(impatient, facts).frontiers == {0: (13, 55)}


@pytest.mark.parametrize("uri", ["sqlite:////proc/nowhere/catalog.db", "sqlite:////dev/null"])
def test_a_catalog_that_can_not_be_opened(uri: str, tmp_path: Path) -> None:
    """A wrong path, or a file that is no database."""
    with pytest.raises(TierUnavailable):
        TierTable(TierSettings(f"file://{tmp_path}", {"type": "sql", "uri": uri}), "orders").load()


def test_an_object_store_that_refuses_connections() -> None:
    """Without a listener: a typed error that names the file and the things to check, and soon."""
    properties = {
        "s3.endpoint": "http://127.0.0.1:9", "s3.access-key-id": "a", "s3.secret-access-key": "b",
        "s3.region": "us-east-1", "s3.connect-timeout": "0.2", "s3.request-timeout": "0.2",
    }  # fmt: skip
    with pytest.raises(TierUnavailable, match="s3://bucket/file") as caught:
        Storage(properties).open("s3://bucket/file")
    assert "tier.properties" in caught.value.hint


def test_properties_are_pairs() -> None:
    """An invalid pair is named by its position: it may be a part of a secret."""
    assert parse_properties(["s3.region=eu", "a=b=c"]) == {"s3.region": "eu", "a": "b=c"}
    with pytest.raises(BadValue, match="2 entries, and number 2 is not a key=value pair") as error:
        parse_properties(["s3.secret-access-key=hush", "hush"])
    assert "hush" not in str(error.value)
