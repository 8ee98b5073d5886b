"""The reference page and the example file, generated from the table of keys."""

from __future__ import annotations

from collections.abc import Iterable
from inspect import getdoc

from embarcadero.config.key import Key, Kind
from embarcadero.config.table import GONE, KEYS, RELATIONS, SECTIONS, STANDS_FOR

_INTRODUCTION = """\
# Configuration

`embarcadero config reference` prints this page, and a test compares the two.

Values come from `embarcadero.yaml`, from the environment, and from options of the command line. A
later source takes precedence. The file is the first of these:

1. the file in `--config` (`config=` in Python),
2. the file in `$EMBARCADERO_CONFIG`,
3. `./embarcadero.yaml`, for the command line only,
4. `~/.config/embarcadero/embarcadero.yaml`, for the command line only.

The environment always applies.

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

    embarcadero config check              # every problem, with its file and line, variable or option
    embarcadero config show               # every value and its origin
    embarcadero config example            # a file with every key, commented out
    embarcadero up --config embarcadero.yaml

```python
import embarcadero as emb

with emb.local(config="embarcadero.yaml") as log:      # emb.connect(config=...) for a running cluster
    log.create_topic("orders")
```

A plain number is in the unit of the table. Other units can be written:

| kind | units |
| --- | --- |
| sizes | B, KB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (powers of 1024) |
| durations | `20ms`, `30s`, `10m`, `2h`, `7d`, `1w`, `1h30m`, `10 minutes`, or ISO 8601 (`PT10M`) |
| shares | `0.8` or `80%` |

Paths in a file are relative to that file's folder.

Processes that `up` starts get the configuration of `up`, through `cluster.json` in the cluster's
folder. For `embarcadero node`, its own file and environment take precedence over that, except for
the sizes of the fabric.

By default nothing listens on the network: brokers and metrics listen on 127.0.0.1. To serve other
machines, set `broker.host` to an address of this machine. Or set it to `0.0.0.0`, and set
`broker.advertised_host` to the address that clients use.
"""

_EMPTY = '""'
_SEEDS = """\
## Names of the first designs

The keys and variables of the first designs of Embarcadero, and their replacements.
"""


def page() -> str:
    """Return the whole reference as Markdown."""
    parts = [_INTRODUCTION]
    for section, kind in SECTIONS.items():
        parts.append(f"## {section}\n\n{getdoc(kind)}\n")
        parts.append(_section(key for key in KEYS.values() if key.section == section))
    parts.append("## Relations between keys\n")
    relations = (f"- {', '.join(f'`{key}`' for key in keys)}: {message}." for keys, _, message in RELATIONS)
    parts.append("\n".join(relations) + "\n")
    parts.append(_SEEDS)
    parts.append(_table(["name", "now"], [[f"`{name}`", _replacement(name)] for name in [*STANDS_FOR, *GONE]]))
    return "\n".join(parts)


def _section(keys: Iterable[Key]) -> str:
    columns = ["key", "default", "unit", "range", "variable", "meaning"]
    return _table(columns, [_row(key) for key in keys])


def _row(key: Key) -> list[str]:
    meaning = key.rule.meaning + (f" Fixed: {key.rule.fixed}." if key.rule.fixed else "")
    variables = " or ".join(f"`{name}`" for name in key.variables)
    return [f"`{key}`", default_of(key), unit_of(key), key.range, variables, meaning]


def default_of(key: Key) -> str:
    """Return a key's default for people."""
    return key.rule.default_text or key.show(key.default)


def unit_of(key: Key) -> str:
    """Return the unit of a plain number, or the kind of the value."""
    if key.unit:
        return key.unit
    return {Kind.TEXT: "text", Kind.PATH: "path", Kind.LIST: "list", Kind.SHARE: "share", Kind.COUNT: "number"}.get(
        key.rule.kind, ""
    )


def _replacement(name: str) -> str:
    if name in STANDS_FOR:
        return f"`{STANDS_FOR[name]}`"
    return f"removed: {GONE[name]}"


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def example_file() -> str:
    """Return an embarcadero.yaml with every key that can be set, commented out."""
    lines = ["# embarcadero.yaml: remove the # from a key to change it. See `embarcadero config reference`."]
    for section in SECTIONS:
        lines += ["", f"# {section}:"]
        for key in KEYS.values():
            if key.section == section and not key.rule.fixed:
                remarks = f"{key.rule.meaning} Range: {key.range}." if key.range else key.rule.meaning
                lines += [f"#   # {remarks}", f"#   {key.name}: {key.show(key.default) or _EMPTY}"]
    return "\n".join(lines) + "\n"
