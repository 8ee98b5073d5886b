"""Invalid input: each problem names its place, the error and the remedy; all are reported together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from embarcadero.config.sources import load, resolve
from embarcadero.errors import BadConfiguration
from embarcadero.limits import CONFIG_BRACKETS_MAX, CONFIG_BYTES_MAX


def problems(tmp_path: Path, text: str, **environ: str) -> list[str]:
    """The problems of a file with this text, without the folder's name."""
    path = tmp_path / "e.yaml"
    path.write_text(text)
    return [str(problem).replace(f"{tmp_path}/", "") for problem in resolve(path, environ=environ).problems]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("broker:\n  prot: 1", "e.yaml:2: broker.prot: is not a key; did you mean broker.port?"),
        ("broker:\n  linger_ms: 1", "e.yaml:2: broker.linger_ms: is not a key; did you mean client.linger_ms?"),
        ("topic:\n  zzz: 1", "e.yaml:2: topic.zzz: is not a key; use one of durable_on,"),
        ("brocker:\n  port: 1", "e.yaml:1: brocker: is not a section; did you mean broker?"),
        ("zzz:\n  port: 1", "e.yaml:1: zzz: is not a section; sections are cluster, broker, fabric,"),
        ("broker: 5", "e.yaml:1: broker: is not a mapping; write keys with values"),
        ("[broker]", "e.yaml:1: is not a mapping; write sections, such as `broker:`"),
        ("broker:\n  [a]: 1", "e.yaml:2: broker: has a name that is not text"),
        ("broker:\n  port: 1\n  port: 2", "e.yaml:3: broker.port: occurs twice; remove one; the first is in e.yaml:2"),
        ("broker:\n  port:", "e.yaml:2: broker.port: has no value; write a value, or remove the line"),
        ("broker:\n  port: many", "e.yaml:2: broker.port: 'many' is not a number; write a number such as 9092"),
        ("broker:\n  port: [1, 2]", "e.yaml:2: broker.port: is a list, not a single value; write a single value"),
        ("broker:\n  port: {a: 1}", "e.yaml:2: broker.port: is not a single value; write a single value, such as 9092"),
        ("broker:\n  port: 9092.5", "e.yaml:2: broker.port: '9092.5' is not a whole number; write a whole number"),
        ("broker:\n  port: 70000", "e.yaml:2: broker.port: 70000 is out of range; use 0 to 65535"),
        ("broker:\n  port: -1", "e.yaml:2: broker.port: -1 is out of range; use 0 to 65535"),
        ("broker:\n  port: 1e400", "e.yaml:2: broker.port: '1e400' is too large"),
        ("cluster:\n  hugepages: maybe", "e.yaml:2: cluster.hugepages: 'maybe' is neither true nor false"),
        ("log:\n  file: ~nobody-at-all/x", "e.yaml:2: log.file: '~nobody-at-all/x' begins with the home of an unknown"),
        ("topic:\n  order: 3", "e.yaml:2: topic.order: '3' is not a choice of this key; use 0 or 1 or 2 or 5"),
        ("broker:\n  credit_bytes: 5 parsecs", "'parsecs' is not a valid unit; use B, KB,"),
        ("broker:\n  credit_bytes: 5s", "e.yaml:2: broker.credit_bytes: 's' is not a valid unit"),
        ("client:\n  linger_ms: 5MiB", "e.yaml:2: client.linger_ms: 'MiB' is not a valid unit; use us, ms, s,"),
        ("broker:\n  port: 9k", "e.yaml:2: broker.port: 'k' is not a valid unit; write a plain number"),
        ("topic:\n  gap_timeout_skip_ms: 1.5ms", "e.yaml:2: topic.gap_timeout_skip_ms: '1.5ms' is not a whole number"),
        ("fabric:\n  log_bytes: 256 MB", "'256 MB' is not a power of two; use 128 MiB or"),
        ("limits:\n  record_bytes: 8MiB", "e.yaml:2: limits.record_bytes: 8 MiB is out of range; use 1 KiB to 4 MiB"),
        ("limits:\n  session_window: 512", "the value '512' cannot be set; it is always 256: the layout of"),
        ("broker:\n  pbr_high_watermark_pct: 80", "is an old name; use broker.water_high"),
        ("sequencer:\n  collectors: 4", "is an old name; it was removed: one sequencer orders"),
    ],
)  # fmt: skip
def test_a_problem_has_a_place_and_a_remedy(tmp_path: Path, text: str, says: str) -> None:
    """Each mistake in a file is exactly one problem."""
    found = problems(tmp_path, text)

    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("EMBARCADERO_BROKER_PORT", "x", "$EMBARCADERO_BROKER_PORT: broker.port: 'x' is not a number"),
        ("EMBARCADERO_BROKER_PORT", "tcp://10.0.0.1:9092", "broker.port: 'tcp://10.0.0.1:9092' is not a number"),
        ("EMBARCADERO_CLIENT_LINGER_MS", "1 parsec", "client.linger_ms: 'parsec' is not a valid unit"),
        ("EMBARCADERO_BROKER_PROT", "1", "$EMBARCADERO_BROKER_PROT: does not belong to a key; did you mean EMB"),
        ("EMBARCADERO_BROKR_PORT", "1", "does not belong to a key; did you mean EMBARCADERO_BROKER_"),
        ("EMBARCADERO_LOG_ZZZZZZZZZZZZ", "1", "does not belong to a key; see `embarcadero config reference`"),
        ("EMBARCADERO_ACK_TIMEOUT_SEC", "90", "is an old name; use client.delivery_timeout_s"),
        ("EMBARCADERO_ACK_DRAIN_US", "1", "it was removed: a doorbell wakes brokers"),
    ],
)  # fmt: skip
def test_a_bad_variable_is_a_problem(variable: str, value: str, says: str) -> None:
    """Values and names in the environment are checked as those in a file are."""
    found = list(map(str, resolve(environ={variable: value}).problems))

    assert len(found) == 1
    assert says in found[0]


@pytest.mark.parametrize(
    "variable",
    ["EMBARCADERO_DEBUG", "EMBARCADERO_SERVICE_HOST", "EMBARCADERO_BROKER_SERVICE_PORT",
     "EMBARCADERO_PORT_9092_TCP_ADDR", "EMBARCADERO_HOME", "PATH"],
)  # fmt: skip
def test_other_programs_variables_are_ignored(variable: str) -> None:
    """Variables that orchestrators and shells set are no configuration."""
    assert not resolve(environ={variable: "1"}).problems


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fabric: {log_bytes: 1MiB, chunk_bytes: 1MiB}", "fabric.log_bytes is 1 MiB, fabric.chunk_bytes is 1 MiB; lo"),
        ("fabric: {log_bytes: 64GiB}", "log_bytes must make 2 to 1024 chunks"),
        ("fabric: {order_slots: 1024}", "order_slots must be at least 4 * round_entries"),
        ("broker: {water_high: 40%}", "broker.water_low is 0.5, broker.water_high is 0.4; water_low must be below"),
        ("broker: {port: 65535}", "broker.port is 65535, cluster.brokers is 4; the ports of all brokers must exist"),
        ("broker: {advertised_port: 65535}", "broker.advertised_port is 65535, cluster.brokers is 4; the ports"),
        ("broker: {advertised_port: 80, port: 0}", "broker.port is 0; advertised ports need fixed ports"),
        ("broker: {host: 0.0.0.0}", "broker.host is 0.0.0.0, broker.advertised_host is empty; clients need an address"),
        (
            "metrics: {port: 65535}\ncluster: {standbys: 0}",
            "metrics.port is 65535, cluster.brokers is 4, cluster.replicas is 1; the ports",
        ),
        ("metrics: {port: 65500}", "metrics.port is 65500, cluster.brokers is 4, cluster.standbys is 1; the ports"),
        ("client: {window_bytes: 1KiB}", "client.window_bytes is 1 KiB, client.batch_bytes is 1 MiB; the window must"),
    ],
)  # fmt: skip
def test_values_must_fit_together(tmp_path: Path, text: str, says: str) -> None:
    """Values that are valid alone and contradict each other are named together, where they were set."""
    found = problems(tmp_path, text)

    assert len(found) == 1
    assert says in found[0]
    assert found[0].startswith("e.yaml:1: ")


def test_listening_on_all_addresses_needs_an_advertised_address(tmp_path: Path) -> None:
    """With an advertised address, a broker may listen on all addresses."""
    assert not problems(tmp_path, "broker: {host: 0.0.0.0, advertised_host: 192.0.2.1}")


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    """File, environment and flags: one error with all of them."""
    path = tmp_path / "e.yaml"
    path.write_text("broker:\n  prot: 1\n  water_low: 90%\ntopic:\n  order: 4\n")
    with pytest.raises(BadConfiguration) as caught:
        load(path, {"cluster.brokers": 0})
    lines = caught.value.message.splitlines()

    assert lines[0] == "the configuration has 4 problems:"
    for number, says in enumerate(["broker.prot", "'4' is not a choice", "cluster.brokers: 0", "water_low"], 1):
        assert says in lines[number]
    assert "config reference" in caught.value.hint


# --- files ------------------------------------------------------------------------------------------------------------
def test_a_syntax_error_has_its_line(tmp_path: Path) -> None:
    """Invalid YAML is reported with its line."""
    assert problems(tmp_path, "broker:\n  port: 1\n bad: [1\n")[0].startswith("e.yaml:3: is not YAML: ")
    assert problems(tmp_path, "broker:\n\tport: 1\n")[0].startswith("e.yaml:2: is not YAML: ")
    assert "is not YAML" in problems(tmp_path, "a: 1\n---\nb: 1\n")[0]


def test_a_missing_file_is_a_problem(tmp_path: Path) -> None:
    """A file that was named must exist."""
    found = resolve(tmp_path / "none.yaml", environ={}).problems

    assert str(found[0]) == (
        f"{tmp_path}/none.yaml: can't be read: No such file or directory; check the path and its permissions"
    )


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    """An unreadable file is reported with the system's reason."""
    assert "can't be read: Is a directory" in str(resolve(tmp_path, environ={}).problems[0])


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    """No real configuration has so many bytes."""
    assert f"has more than {CONFIG_BYTES_MAX} bytes" in problems(tmp_path, "#" * (CONFIG_BYTES_MAX + 1))[0]


def test_many_brackets_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    """The parser would take 14 s for a file of them that is small enough."""
    many = CONFIG_BRACKETS_MAX // 2
    within = "client:\n  brokers: " + "[" * many + "]" * many + "\n# " + "{" * many
    assert "brackets" not in problems(tmp_path, within)[0]
    assert f"opens more than {CONFIG_BRACKETS_MAX} brackets" in problems(tmp_path, within + "{")[0]


@pytest.mark.parametrize(
    "text", ["[" * 5_000, "{a: " * 5_000, "a: &x [*x]", "broker: &b\n  <<: *b\n", "\0", "a: !!python/x 1"]
)
def test_hostile_files_are_problems(tmp_path: Path, text: str) -> None:
    """Depth, cycles, tags and control characters end as a problem."""
    assert problems(tmp_path, text)


@given(st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_read_or_refused(tmp_path: Path, content: bytes) -> None:
    """No content makes reading fail in another way."""
    path = tmp_path / "any.yaml"
    path.write_bytes(content)
    found = resolve(path, environ={})

    assert found.problems or found.config()
