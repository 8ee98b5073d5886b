"""Values as people write them, and the order in which sources win."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from embarcadero import limits
from embarcadero.client.arguments import PublisherOptions, publisher_options
from embarcadero.config import DEFAULTS, Config, FabricSizes, load
from embarcadero.config.key import BYTES, SECONDS, BadQuantity, quantity
from embarcadero.config.sources import as_given, config_of, resolve, values_of
from embarcadero.config.table import KEYS
from embarcadero.errors import BadConfiguration, BadValue
from embarcadero.limits import GIB, KIB, MIB

SETTABLE = [key for key in KEYS.values() if not key.rule.fixed]


@pytest.fixture(autouse=True)
def no_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the user's own file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("EMBARCADERO_DATA_DIR", raising=False)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "embarcadero.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("broker.credit_bytes", "16MiB", 16 * MIB),
        ("broker.credit_bytes", "256 MB", 256_000_000),
        ("broker.credit_bytes", "1 gib", GIB),
        ("broker.credit_bytes", "1_000_000", 1_000_000),
        ("broker.credit_bytes", "0.5MiB", 512 * KIB),
        ("broker.backpressure_after_s", "30s", 30.0),
        ("broker.backpressure_after_s", "1.5 min", 90.0),
        ("broker.backpressure_after_s", "250ms", 0.25),
        ("broker.backpressure_after_s", "7", 7.0),
        ("client.linger_ms", "5ms", 5.0),
        ("client.linger_ms", "1s", 1_000.0),
        ("client.linger_ms", "100us", 0.1),
        ("client.linger_ms", "0", 0.0),
        ("topic.session_ttl_s", "2h", 7_200),
        ("topic.session_ttl_s", "1d", 86_400),
        ("topic.gap_timeout_fence_ms", "1s", 1_000),
        ("broker.water_high", "80%", 0.8),
        ("broker.water_high", "0.75", 0.75),
        ("cluster.one_process", "Yes", True),
        ("cluster.one_process", "off", False),
        ("client.brokers", "a:1, b:2", ["a:1", "b:2"]),
        ("log.level", "WARNING", "warning"),
        ("topic.order", "5", 5),
        ("cluster.pin", "0,1", "0,1"),
    ],
)
def test_values_may_have_units(key: str, text: str, value: Any) -> None:
    """Sizes, times and shares are read in any of their units; a plain number is in the key's own."""
    read = KEYS[key].read(text)

    assert read == pytest.approx(value) if isinstance(value, float) else read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("key", SETTABLE, ids=str)
def test_shown_values_can_be_read(key: Any) -> None:
    """Every default, as displayed, is read as itself."""
    assert key.read(key.show(key.default)) == key.default


@given(st.integers(64 * KIB, GIB))
def test_sizes_are_shown_and_read_without_loss(value: int) -> None:
    """Any number of bytes survives formatting."""
    key = KEYS["broker.credit_bytes"]

    assert key.read(key.show(value)) == value


@given(st.text(max_size=30), st.sampled_from(SETTABLE))
@example("a\x85/", KEYS["cluster.data_dir"])
@example("a/ /", KEYS["cluster.data_dir"])
def test_any_text_is_a_value_or_a_problem(text: str, key: Any) -> None:
    """No text makes reading fail in another way."""
    with contextlib.suppress(BadQuantity):
        value = key.read(text)
        assert key.read(key.show(value)) == value or isinstance(value, float)


@given(st.sampled_from([*BYTES, *SECONDS]), st.integers(0, 10**6))
def test_units_belong_to_their_kind(unit: str, number: int) -> None:
    """A size has no unit of time, a time no unit of size."""
    for units in (BYTES, SECONDS):
        if unit in units:
            assert quantity(f"{number}{unit}", units, 1, "") == pytest.approx(number * units[unit])
        else:
            with pytest.raises(BadQuantity, match="is not a valid unit"):
                quantity(f"{number}{unit}", units, 1, "")


# --- which source wins ------------------------------------------------------------------------------------------------
def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    """Each source overrides the previous one, and each value has its origin."""
    path = written(tmp_path, "broker:\n  port: 1\n  host: 10.0.0.1\ncluster:\n  brokers: 2\n")
    environ = {"EMBARCADERO_BROKER_PORT": "2", "EMBARCADERO_BROKER_HOST": "10.0.0.2"}
    found = resolve(path, {"broker.port": as_given("broker.port", 3, "--port")}, environ=environ)
    config = found.config()

    assert (config.broker.port, config.broker.host, config.cluster.brokers) == (3, "10.0.0.2", 2)
    assert [found.origins[key] for key in ("broker.port", "broker.host", "cluster.brokers", "log.level")] == [
        "--port", "$EMBARCADERO_BROKER_HOST", f"{path}:5", "default",
    ]  # fmt: skip


def test_short_variables_lose_to_full_ones() -> None:
    """EMBARCADERO_DATA_DIR is cluster.data_dir, unless that has its own variable."""
    short = {"EMBARCADERO_DATA_DIR": "/short"}

    assert resolve(environ=short).config().cluster.data_dir == "/short"
    both = short | {"EMBARCADERO_CLUSTER_DATA_DIR": "/full"}
    assert resolve(environ=both).config().cluster.data_dir == "/full"


def test_an_empty_variable_is_ignored() -> None:
    """`VARIABLE= command` removes a variable."""
    assert resolve(environ={"EMBARCADERO_BROKER_PORT": ""}).config() == DEFAULTS


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    """Nothing, comments and sections without keys are all valid."""
    for text in ("", "# nothing\n", "broker:\n", "broker: {}\n", "---\n"):
        assert resolve(written(tmp_path, text), environ={}).config() == DEFAULTS


def test_the_file_is_found_in_the_usual_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--config, then $EMBARCADERO_CONFIG, then ./embarcadero.yaml, then the one in the user's home."""

    def port(**given: Any) -> int:
        return load(search=True, **given).broker.port

    assert port() == limits.PORT_DEFAULT
    home = tmp_path / "home" / ".config" / "embarcadero"
    home.mkdir(parents=True)
    (home / "embarcadero.yaml").write_text("broker: {port: 1}")
    assert port() == 1
    written(tmp_path, "broker: {port: 2}")
    assert port() == 2
    (tmp_path / "named.yaml").write_text("broker: {port: 3}")
    monkeypatch.setenv("EMBARCADERO_CONFIG", str(tmp_path / "named.yaml"))
    assert port() == 3
    (tmp_path / "given.yaml").write_text("broker: {port: 4}")
    assert port(config="given.yaml") == 4


def test_a_program_reads_only_named_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in the working folder changes no Python program; the environment does."""
    written(tmp_path, "broker: {port: 2}")
    monkeypatch.setenv("EMBARCADERO_CLIENT_LINGER_MS", "9")
    config = load()

    assert (config.broker.port, config.client.linger_ms) == (limits.PORT_DEFAULT, 9.0)


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    """A relative path in a file does not depend on the folder in which a command runs."""
    (tmp_path / "far").mkdir()
    path = written(tmp_path / "far", "cluster: {data_dir: data}\nlog: {file: ~/x.log}\n")
    config = resolve(path, environ={}).config()

    assert config.cluster.data_dir == str(tmp_path / "far" / "data")
    assert config.log.file == str(tmp_path / "home" / "x.log")


def test_a_config_is_used_unchanged() -> None:
    """load() of a Config changes only the options that the caller passes."""
    before = load(flags={"broker.port": 7, "topic.order": 5})

    assert load(before) == before
    assert load(before, {"cluster.brokers": 1, "broker.port": None}).cluster.brokers == 1


def test_values_recreate_the_configuration() -> None:
    """All values of a configuration, by key, recreate it."""
    config = load(flags={"client.brokers": ["a:1"], "fabric.log_bytes": 32 * MIB})

    assert config_of(values_of(config)) == config
    assert isinstance(config, Config)


# --- sizes ------------------------------------------------------------------------------------------------------------
def test_small_logs_have_small_chunks() -> None:
    """A log always has several chunks, so that some can be free while others fill, unless configured otherwise."""
    assert load().fabric.chunk_bytes == limits.CHUNK_BYTES
    assert load(flags={"fabric.log_bytes": 32 * MIB}).fabric.chunk_bytes == 8 * MIB
    assert load(flags={"fabric.log_bytes": 32 * MIB, "fabric.chunk_bytes": MIB}).fabric.chunk_bytes == MIB
    for bad in (100 * MIB, 3 * MIB):
        with pytest.raises(BadConfiguration, match="power of two"):
            load(flags={"fabric.log_bytes": bad})


def test_sizes_check_themselves() -> None:
    """Sizes made by a program rather than by the configuration are checked too, all of them."""
    with pytest.raises(BadValue, match=r"power of two, not 3.*sessions must be.*") as caught:
        FabricSizes(pending_slots=3, sessions=0)
    assert "log_bytes" not in str(caught.value)
    with pytest.raises(BadValue, match="2 to 1024 chunks"):
        FabricSizes(log_bytes=MIB, chunk_bytes=MIB)


# --- publishers -------------------------------------------------------------------------------------------------------
def test_publishers_use_the_configuration_unless_overridden() -> None:
    """Every option of a publisher that has a key; `none` is no compression."""
    usual = load(
        flags={
            "client.ack": 0, "client.linger_ms": 7, "client.batch_bytes": 1000, "client.window_bytes": 2000,
            "client.delivery_timeout_s": 9, "client.compression": "zstd",
        }
    ).client  # fmt: skip
    options = publisher_options(usual, {"linger_ms": 1})

    assert (options.ack, options.linger_ms, options.batch_bytes, options.window_bytes) == (0, 1, 1000, 2000)
    assert (options.delivery_timeout, options.compression) == (9.0, "zstd")
    assert publisher_options(DEFAULTS.client, {}) == PublisherOptions()
