"""Text from people and programs: configuration, cluster.json, names, roles, addresses, times, options, offsets."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from random import Random
from typing import Final

import msgspec

from embarcadero.client.arguments import parse_addresses
from embarcadero.config import DEFAULTS, load
from embarcadero.config.key import PREFIX
from embarcadero.config.sources import Given, resolve
from embarcadero.config.table import KEYS
from embarcadero.errors import BadValue
from embarcadero.fabric.region import check_name
from embarcadero.node.folder import ClusterFolder, ClusterInfo, NodeInfo
from embarcadero.node.process import parse_cores, parse_roles
from embarcadero.placement.topics import check_topic_name
from embarcadero.storage.layout import base_seqs, damaged_span
from embarcadero.watch.endpoints import EndpointFiles, NodeEndpoint
from embarcadero_proof.fuzz.mutate import mutated
from embarcadero_proof.fuzz.scratch import folder
from embarcadero_proof.fuzz.target import Inputs, Target, agree
from embarcadero_proof.fuzz.tree import tree_mutation

_WORDS: Final = (
    *(full.encode() for full in KEYS), *(full.partition(".")[0].encode() + b":\n  " for full in KEYS),
    b"16MiB", b"30s", b"80%", b"true", b"null", b"&a ", b"*a", b"!!python/object:os.system ", b"<<: ", b"|", b"- ",
    b"\n", b"  ", b": ", b"{", b"[", b"[" * 2_000, b"9" * 5_000, b"1e999", b"-0", b"\xef\xbb\xbf", b"\x00",
)  # fmt: skip


# --- configuration ----------------------------------------------------------------------------------------------------
def _config_files() -> Inputs:
    sections: dict[str, list[str]] = {}
    for key in KEYS.values():
        default = getattr(getattr(DEFAULTS, key.section), key.name)
        sections.setdefault(key.section, []).append(f"  {key.name}: {key.show(default) or 'null'}")
    whole = "".join(f"{section}:\n" + "\n".join(lines) + "\n" for section, lines in sections.items())
    short = "broker:\n  port: 9092  # here\nfabric: {log_bytes: 64MiB}\nclient:\n  brokers: [a:1, b:2]\n"
    return [whole.encode(), short.encode(), b"", b"# nothing\n", b"broker: &a\n  port: 1\nsequencer: *a\n"]


def _config_file(data: bytes) -> str:
    path = folder() / "embarcadero.yaml"
    path.write_bytes(data)
    config = resolve(path, environ={}).config()
    agree(load(config) == config, "a configuration changes when it is loaded again")
    return "fine"


def _environments() -> Inputs:
    lines = []
    for full, key in KEYS.items():
        default = getattr(getattr(DEFAULTS, key.section), key.name)
        lines.append(f"{key.variables[0]}={key.show(default) or '1'}")
        lines.append(f"{full}={key.show(default) or '1'}")
    return ["\n".join(lines[at : at + 6]).encode() for at in range(0, len(lines), 6)]


def _environment(data: bytes) -> str:
    """Parse variables and flags, one per line."""
    environ: dict[str, str] = {}
    flags: dict[str, Given] = {}
    for line in data.decode(errors="replace").split("\n")[:200]:
        name, _, value = line.partition("=")
        if name in KEYS:
            flags[name] = Given(value.split(",") if "," in value else value, f"--{name}")
        else:
            environ[name] = value
    resolve(None, flags, environ=environ).config()
    return f"fine, {bool(flags)}"


# --- files of a cluster -----------------------------------------------------------------------------------------------
def _cluster_files() -> Inputs:
    info = ClusterInfo(
        version="1", id="0badcafe", generation=3, fabric="/dev/shm/x", config=DEFAULTS, supervisor=12,
        nodes=[NodeInfo(roles="broker:0,sequencer", pid=7), NodeInfo(roles="replica:1", pid=0)],
    )  # fmt: skip
    return [msgspec.json.encode(info)]


def _cluster_file(data: bytes) -> str:
    (folder() / "cluster.json").write_bytes(data)
    info = ClusterFolder(folder()).read_info()
    info.pid_of("sequencer")
    return f"{min(len(info.nodes), 3)} nodes"


def _place_files() -> Inputs:
    left = {"broker:0": {"settled": 1}}
    return [msgspec.json.encode(NodeEndpoint(roles="broker:0", pid=7, host="::1", port=9, left=left))]


def _place_file(data: bytes) -> str:
    """Read endpoint files; invalid ones are left out."""
    endpoints = folder() / "watch"
    endpoints.mkdir(exist_ok=True)
    (endpoints / "node.json").write_bytes(data)
    found = EndpointFiles(folder()).read()
    return f"{len(found)} read, {[len(endpoint.url) for endpoint in found]}"


# --- texts ------------------------------------------------------------------------------------------------------------
def _options(text: str) -> object:
    from embarcadero.spark.read.options import read_options

    pairs = (line.partition("=") for line in text.split("\n"))
    options = {"brokers": "a:1", "topic": "t"} | {name: value for name, _, value in pairs if name}
    return read_options(options, streaming=None)


def _offset(text: str) -> object:
    from embarcadero.spark.read.options import parse_stream_offset, spans

    try:
        offset = json.loads(text)
    except (ValueError, RecursionError):
        raise BadValue("it is not JSON") from None
    found = parse_stream_offset(offset)
    agree(parse_stream_offset(found.json()) == found, "an offset changes when it is written and parsed again")
    return sum(len(spans(each.without_cuts(), each)) for each in found.topics.values())


_PARSERS: tuple[tuple[Callable[[str], object], tuple[str, ...]], ...] = (
    (parse_roles, ("broker:0,sequencer,replica:3", "broker:12")),
    (parse_addresses, ("127.0.0.1:9092,[::1]:1", "host:65535")),
    (check_topic_name, ("orders", "a.b_c-9")),
    (check_name, ("epoch-3/order-7", "broker-0.1/log")),
    (parse_cores, ("0", "0,1")),
    (lambda text: base_seqs(text.split("\n")), ("00000000000000001000.log",)),
    (damaged_span, ("00000000000000000001-00000000000000000009-span.damaged",)),
)  # fmt: skip

_SPARK: Final[tuple[tuple[Callable[[str], object], tuple[str, ...]], ...]] = (
    (_options, ('startingOffsets={"0": {"seq": 5}}\nmaxRecordsPerTrigger=10', "startingTimestamp=2026-01-31T12:00Z")),
    (
        _offset,
        (
            '{"topic": "t", "reader": "r", "0": {"index": 1, "seq": 5, "cuts": [[0, 2]], "within": 1}}',
            '{"reader": "r", "topics": {"5": {"topic": "t", "0": {"index": 1, "seq": 5, "first": [0, 2]}}}}',
        ),
    ),
)  # fmt: skip
"""Spark's texts, where PySpark is installed."""
if find_spec("pyspark") is not None:
    _PARSERS = (*_PARSERS, *_SPARK)


def _texts() -> Inputs:
    return [bytes([number]) + text.encode() for number, (_, texts) in enumerate(_PARSERS) for text in texts]


def _text(data: bytes) -> str:
    """Parse a text; its first byte chooses the parser."""
    number = (data[0] if data else 0) % len(_PARSERS)
    _PARSERS[number][0](data[1:].decode(errors="replace"))
    return f"parser {number}"


def _mutate_text(data: bytes, rng: Random, pool: Inputs) -> bytes:
    words = (b"9" * 5_000, b"-1", b",", b":", b"\xd9\xa1", b"0x", b"1e9", b"{", b"[" * 3_000, b"null", b"\n", b"..")
    return data[:1] + mutated(data[1:], rng, [one[1:] or b"x" for one in pool], words)


SETTINGS: Final = (
    Target("config-files", "embarcadero.yaml", _config_files, _config_file, words=_WORDS),
    Target("config-values", "environment and flags", _environments, _environment,
           words=(*_WORDS, PREFIX.encode(), b"=", b"\n")),
    Target("cluster-files", "cluster.json", _cluster_files, _cluster_file, tree_mutation(msgspec.json)),
    Target("watch-files", "files with the metrics endpoints of nodes", _place_files, _place_file,
           tree_mutation(msgspec.json)),
    Target("texts", "names, roles, addresses, times, options and offsets of Spark", _texts, _text, _mutate_text),
)  # fmt: skip
