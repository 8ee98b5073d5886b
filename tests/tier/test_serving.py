"""Tables as a broker reads them for clients: in its own warehouse, with its own keys, and without long waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from embarcadero.client.reads import open_table
from embarcadero.errors import BadTable, EmbarcaderoError, NotAvailable, TierUnavailable
from embarcadero.tier.parquet import FileSpan, write_span
from embarcadero.tier.serving import TableServer
from embarcadero.tier.snapshots import LoadedTable
from embarcadero.tier.storage import Storage, TierSettings
from embarcadero.tier.table import TierTable
from embarcadero.types import Gap, GapKind, Hole, Tier
from embarcadero.wire.messages import Fetch
from embarcadero.wire.schemas import RAW
from tests.tier.entries import batch_of, hole, raw
from tests.tier.object_store import Endpoint

ASK = Fetch(lane=0, start=0, max_bytes=1 << 20, table=True)
SPAN = FileSpan(lane=0, start=0, stop=2, start_seq=0, stop_seq=3)


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hanging() -> Iterator[Endpoint]:
    with Endpoint(None) as endpoint:
        yield endpoint


def tier_of(metadata: str, table: str = "embarcadero.t", **more: Any) -> Tier:
    warehouse = metadata.rpartition("/")[0]
    return Tier(id="1", warehouse=warehouse, table=table, metadata=metadata, frontiers={0: (2, 3)}, **more)


def s3_tier(table: str) -> Tier:
    """A table of the warehouse s3://w, whatever is there."""
    return tier_of(f"s3://w/{table}/metadata/1.metadata.json", f"embarcadero.{table}")


def failure(server: TableServer, tier: Tier) -> EmbarcaderoError:
    with pytest.raises(EmbarcaderoError) as caught:
        server.fetch(tier, RAW, ASK, 2)
    return caught.value


def committed(folder: Path, name: str, data: str = "") -> LoadedTable:
    """A table with two batches, in a warehouse in a folder; its file may be elsewhere."""
    table = TierTable(TierSettings.local(folder), name)
    made = table.create(name, "1", RAW)
    log = [batch_of(raw([b"a", b"b"]), 0, 0), batch_of(raw([b"c"]), 1, 2)]
    location = data or made.table.location()
    facts = write_span(table.storage, location, SPAN, 1, RAW, [log], made.entries_location)
    return table.commit({}, [facts], {0: (2, 3)}, {0: (0, 0)}, RAW, 1)


def values_of(server: TableServer, tier: Tier) -> int:
    return int(server.fetch(tier, RAW, ASK, 2).entries["count"].sum())


# --- gaps -------------------------------------------------------------------------------------------------------------
def test_a_gap_comes_in_one_piece_however_long_it_is(tmp_path: Path) -> None:
    """A restart skips millions of positions; readers used to get a gap for every 4,096 of them."""
    far = 5_000_000
    table = TierTable(TierSettings.local(tmp_path), "t")
    made = table.create("t", "1", RAW)
    log = [batch_of(raw([b"a", b"b"]), 0, 0), hole(1, far), batch_of(raw([b"c"]), far, 2)]
    span = FileSpan(lane=0, start=0, stop=far + 1, start_seq=0, stop_seq=3)
    facts = write_span(table.storage, made.table.location(), span, 1, RAW, [log], made.entries_location)
    done = table.commit({}, [facts], {0: (far + 1, 3)}, {0: (0, 0)}, RAW, 1)
    holes = {0: [Hole(1, far, 2, 2, never_durable=True)]}
    tier = Tier(
        id="1", warehouse=TierSettings.local(tmp_path).warehouse, table="embarcadero.t", metadata=done.metadata,
        frontiers={0: (far + 1, 3)}, holes=holes,
    )  # fmt: skip
    server = TableServer({}, TierSettings.local(tmp_path).warehouse)
    whole = Gap(GapKind.NEVER_DURABLE, 1, far)
    for start, want in ((1, whole), (2_000, whole._replace(start=2_000))):
        found = server.fetch(tier, RAW, replace(ASK, start=start, never_durable=True), far + 1)
        assert (found.gap, found.next_index) == (want, far)
    first = server.fetch(tier, RAW, ASK, far + 1)
    assert (len(first.entries), first.gap, first.next_index) == (1, None, 1)
    beyond = server.fetch(replace(tier, frontiers={0: (far, 2)}), RAW, replace(ASK, start=1), far)
    assert (beyond.gap, beyond.next_index) == (Gap(GapKind.LOST, 1, far), far)
    trimmed = server.fetch(replace(tier, starts={0: (far, 2)}), RAW, ASK, far + 1)
    assert (trimmed.gap, trimmed.next_index) == (Gap(GapKind.TRIMMED, 0, far), far)


# --- stores that do not answer ----------------------------------------------------------------------------------------
def test_a_request_without_an_answer_is_sent_once_and_the_error_names_the_store(hanging: Endpoint) -> None:
    """Retries of the S3 client would multiply the time until it is reported; the reader retries."""
    error = failure(TableServer(hanging.properties(), "s3://w"), s3_tier("orders"))
    assert isinstance(error, TierUnavailable)
    assert hanging.url in error.message
    assert "embarcadero.orders" in error.message
    assert hanging.requests == 1


def test_a_client_that_reads_the_table_itself_has_the_same_timeouts(hanging: Endpoint) -> None:
    """Its own properties take precedence; without any, it would wait for as long as the S3 client likes."""
    brokers: Any = SimpleNamespace(table_properties=[f"{key}={value}" for key, value in hanging.properties().items()])
    with pytest.raises(TierUnavailable):
        open_table(s3_tier("orders"), brokers).find(0, "index", 0)
    assert hanging.requests == 1
    of_client = open_table(s3_tier("orders"), cast("Any", SimpleNamespace(table_properties=[]))).storage.properties
    of_broker = TableServer({}, "s3://w")._storage.properties
    for name in ("s3.connect-timeout", "s3.request-timeout", "s3.retry-strategy-impl"):
        assert of_client[name] == of_broker[name]


def test_a_store_that_took_long_to_fail_is_left_alone_for_as_long(hanging: Endpoint) -> None:
    """Reads then fail immediately, each with the name of its own table.

    One read at a time checks whether it is back.
    """
    clock = Clock()
    server = TableServer(hanging.properties(), "s3://w", clock=clock)
    with_time = server._table

    def slowly(tier: Tier) -> Any:
        clock.now_s += 4
        return with_time(tier)

    server._table = slowly  # type: ignore[method-assign]
    failure(server, s3_tier("orders"))
    server._table = with_time  # type: ignore[method-assign]
    for _ in range(3):
        clock.now_s += 1
        error = failure(server, s3_tier("payments"))
        assert isinstance(error, TierUnavailable)
        assert "embarcadero.payments" in error.message
        assert hanging.url in error.message
        assert "orders" not in str(error)
    assert hanging.requests == 1

    clock.now_s += 2
    probe = Thread(target=failure, args=(server, s3_tier("orders")))
    probe.start()
    while hanging.requests == 1:
        assert probe.is_alive()
    assert isinstance(failure(server, s3_tier("payments")), TierUnavailable)
    probe.join()
    assert hanging.requests == 2


def test_a_store_that_answers_again_is_used_by_all(tmp_path: Path) -> None:
    """The read that finds it available lets the others in."""
    clock = Clock()
    server = TableServer({}, f"file://{tmp_path}", clock=clock)
    server._set_down("no answer", 3.0)
    tier = tier_of(committed(tmp_path, "orders").metadata)
    assert isinstance(failure(server, tier), TierUnavailable)
    clock.now_s += 3.0
    assert values_of(server, tier) == 3
    assert values_of(server, tier) == 3


def test_a_problem_of_one_table_blocks_no_other(tmp_path: Path) -> None:
    """A file that can't be opened, and a refused request, are no evidence about other tables."""
    good = tier_of(committed(tmp_path, "orders").metadata)
    (tmp_path / "file").write_text("no folder")
    server = TableServer({}, f"file://{tmp_path}")
    error = failure(server, tier_of(f"file://{tmp_path}/file/1.metadata.json", "embarcadero.broken"))
    assert isinstance(error, TierUnavailable)
    assert values_of(server, good) == 3

    with Endpoint("403 Forbidden") as refusing:
        server = TableServer(refusing.properties(), "s3://w")
        assert isinstance(failure(server, s3_tier("orders")), TierUnavailable)
        before = refusing.requests
        assert "embarcadero.payments" in failure(server, s3_tier("payments")).message
        assert refusing.requests > before
    with Endpoint("503 Slow Down") as busy:
        server = TableServer(busy.properties(), "s3://w")
        failure(server, s3_tier("orders"))
        before = busy.requests
        failure(server, s3_tier("payments"))
        assert busy.requests == before


# --- destinations of keys
# -----------------------------------------------------------------------------------------------
def test_no_client_chooses_where_the_keys_of_a_broker_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic's record, which clients write, may name any endpoint; so may the metadata of a table."""
    endpoints: list[str | None] = []

    def connected(**options: Any) -> Any:
        endpoints.append(options["endpoint_override"])
        raise OSError("AWS Error NETWORK_CONNECTION")

    monkeypatch.setattr("pyarrow.fs.S3FileSystem", connected)
    theirs = {"s3.endpoint": "http://collector.example", "s3.region": "us-east-1"}
    for ours in ({}, {"s3.endpoint": "http://ours.example"}):
        server = TableServer(
            {"s3.access-key-id": "a", "s3.secret-access-key": "b", "s3.region": "eu", **ours}, "s3://w"
        )
        error = failure(server, tier_of("s3://w/t/1.metadata.json", properties=theirs))
        assert isinstance(error, TierUnavailable)
        assert "collector" not in error.message
    assert endpoints == [None, "http://ours.example"]

    loaded = committed(tmp_path, "orders")
    path = Path(loaded.metadata.removeprefix("file://"))
    facts = json.loads(path.read_text())
    facts["properties"]["py-io-impl"] = "no.such.Thing"
    path.with_name("9.metadata.json").write_text(json.dumps(facts))
    tier = tier_of(f"file://{path.with_name('9.metadata.json')}")
    assert values_of(TableServer({}, f"file://{tmp_path}"), tier) == 3


def test_only_paths_below_the_warehouse_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused whether it exists or not, in the same words: nothing is looked up."""
    home = tmp_path / "home"
    (home / "warehouse").mkdir(parents=True)
    (home / "secret.json").write_text("{}")
    (tmp_path / "home" / "warehouse" / "link").symlink_to(tmp_path / "home")
    (home / "warehouse-too").mkdir()
    server = TableServer({}, f"file://{home}/warehouse")
    monkeypatch.setattr(Storage, "open", None)
    monkeypatch.setattr("embarcadero.tier.storage.PyArrowFileIO.new_input", None)
    for location in (
        "file:///etc/hostname", "file:///etc/nothing", "/etc/hostname", f"file://{home}/secret.json",
        f"file://{home}/warehouse/../secret.json", f"file://{home}/warehouse/link/secret.json",
        f"file://{home}/warehouse-too/1.metadata.json", f"file://{home}/warehouse", "s3://w/t/1.metadata.json",
        "s3://[",
    ):  # fmt: skip
        error = failure(server, tier_of(location))
        assert isinstance(error, NotAvailable)
        assert error.message == f"{location} is outside the warehouse whose tables this broker reads"
        assert "tier.warehouse" in error.hint
    in_bucket = TableServer({"s3.region": "eu"}, "s3://lake/tables/")
    for location in ("s3://lake/other/1.json", "s3://lake2/tables/1.json", "s3://lake/tables/../other/1.json"):
        assert isinstance(failure(in_bucket, tier_of(location)), NotAvailable)
    Storage({}, "s3://lake/tables").io.check("s3a://lake/tables/t/1.json")


def test_files_that_a_table_names_elsewhere_are_not_opened(tmp_path: Path) -> None:
    """Its metadata is in the warehouse, its data is not."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "data").mkdir(parents=True)
    tier = tier_of(committed(tmp_path / "home", "orders", f"file://{elsewhere}").metadata)
    server = TableServer({}, f"file://{tmp_path}/home")
    assert isinstance(failure(server, tier), NotAvailable)
    assert values_of(TableServer({}, f"file://{tmp_path}"), tier) == 3


def test_a_missing_file_of_the_warehouse_is_named(tmp_path: Path) -> None:
    """There, the error describes the problem."""
    loaded = committed(tmp_path, "orders")
    for path in (tmp_path / "warehouse").rglob("data/*.parquet"):
        path.unlink()
    error = failure(TableServer({}, f"file://{tmp_path}"), tier_of(loaded.metadata))
    assert isinstance(error, BadTable)
    assert "is missing" in error.message
