"""The reference page and the example file, made from the table of keys."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import getdoc

from embarcadero.config.key import Key, Kind
from embarcadero.config.table import GONE, KEYS, RELATIONS, SECTIONS, STANDS_FOR

_INTRODUCTION = """\
# Configuration

This page is made by `embarcadero config reference`; a test keeps it true.

Values come from `embarcadero.yaml`, then from the environment, then from options of the command line; the later one
wins. The file is the one named by `--config` (`config=` in Python), else by `$EMBARCADERO_CONFIG`, else
`./embarcadero.yaml`, else `~/.config/embarcadero/embarcadero.yaml`. A Python program reads a file only if `config=` or
`$EMBARCADERO_CONFIG` names one; the environment always counts.

```yaml
# embarcadero.yaml
cluster:
  brokers: 2
broker:
  port: 9200
fabric:
  log_bytes: 64MiB
client:
  linger_ms: 5
```

    embarcadero config check              # every problem with its place: file and line, variable, option
    embarcadero config show               # every value and where it came from
    embarcadero config example            # a file with every key, commented out
    embarcadero up --config embarcadero.yaml

```python
import embarcadero as emb

with emb.local(config="embarcadero.yaml") as log:      # emb.connect(config=...) for a running cluster
    log.create_topic("orders")
```

A plain number is in the unit that the table names. Sizes may be written with B, KB, MB, GB, TB (powers of 1000) or KiB,
MiB, GiB, TiB (powers of 1024); durations as `20ms`, `30s`, `10m`, `2h`, `7d`, `1w`, `1h30m`, `10 minutes` or ISO 8601
(`PT10M`); shares as `0.8` or `80%`. Paths in a file are relative to that file's folder. Processes that `up` starts get
the configuration of `up`, through `cluster.json` in the cluster's folder; `embarcadero node` lets its own file and
environment win over that, except for the sizes of the fabric.

By default nothing listens on the network: brokers and metrics are on 127.0.0.1. To serve others, set `broker.host` to
an address of this machine; or to `0.0.0.0` together with `broker.advertised_host`, the address that clients are told.
"""

_EMPTY = '""'
_SEEDS = """\
## Names of the first designs

Every key and variable that the first designs of Embarcadero had, and what became of it.
"""


def page() -> str:
    """The whole reference, as Markdown."""
    parts = [_INTRODUCTION]
    for section, kind in SECTIONS.items():
        parts.append(f"## {section}\n\n{getdoc(kind)}\n")
        parts.append(_section(key for key in KEYS.values() if key.section == section))
    parts.append("## What must fit together\n")
    parts.append("\n".join(f"- {', '.join(f'`{key}`' for key in keys)}: {says}." for keys, _, says in RELATIONS) + "\n")
    parts.append(_SEEDS)
    parts.append(_table(["name", "here"], [[f"`{name}`", _became(name)] for name in [*STANDS_FOR, *GONE]]))
    return "\n".join(parts)


def _section(keys: Iterable[Key]) -> str:
    columns = ["key", "default", "unit", "range", "variable", "meaning"]
    return _table(columns, [_row(key) for key in keys])


def _row(key: Key) -> list[str]:
    meaning = key.rule.meaning + (f" Fixed: {key.rule.fixed}." if key.rule.fixed else "")
    variables = " or ".join(f"`{name}`" for name in key.variables)
    return [f"`{key}`", default_of(key), unit_of(key), key.range, variables, meaning]


def default_of(key: Key) -> str:
    """A key's default in words."""
    return key.rule.default_text or key.show(key.default)


def unit_of(key: Key) -> str:
    """The unit of a plain number, or what kind of value it is."""
    if key.unit:
        return key.unit
    return {Kind.TEXT: "text", Kind.PATH: "path", Kind.LIST: "list", Kind.SHARE: "share", Kind.COUNT: "number"}.get(
        key.rule.kind, ""
    )


def _became(name: str) -> str:
    if name in STANDS_FOR:
        return f"`{STANDS_FOR[name]}`"
    return f"gone, because {GONE[name]}"


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def example_file() -> str:
    """An embarcadero.yaml that changes nothing: every key that can be set, commented out."""
    lines = ["# embarcadero.yaml: remove the # before what you want to change. See `embarcadero config reference`."]
    for section in SECTIONS:
        lines += ["", f"# {section}:"]
        for key in KEYS.values():
            if key.section == section and not key.rule.fixed:
                remarks = f"{key.rule.meaning} Range: {key.range}." if key.range else key.rule.meaning
                lines += [f"#   # {remarks}", f"#   {key.name}: {key.show(key.default) or _EMPTY}"]
    return "\n".join(lines) + "\n"
