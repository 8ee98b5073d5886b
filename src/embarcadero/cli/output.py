"""Code shared by all commands: addresses of brokers, configuration, output of results and errors."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from embarcadero.errors import EmbarcaderoError

if TYPE_CHECKING:
    from embarcadero.client.api.sync_log import Log
    from embarcadero.config import Config
    from embarcadero.config.sources import Resolved
    from embarcadero.types import ReaderProgress, Tail, Tier


DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        show_default=False,
        help="The cluster's folder. Default: $EMBARCADERO_DATA_DIR, else ~/.local/state/embarcadero/default.",
    ),
]
BrokersOption = Annotated[
    str | None,
    typer.Option(
        "--brokers",
        show_default=False,
        help="Addresses host:port, separated by commas. Default: the cluster of --data-dir if given, else "
        "$EMBARCADERO_BROKERS, else the running cluster of the default folder, else 127.0.0.1:9092.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def data_dir_or_default(data_dir: Path | None) -> Path:
    """Return the given folder, or the configured one."""
    from embarcadero.node.folder import data_dir_of

    return data_dir or data_dir_of(settings())


def find_brokers(brokers: str | None, data_dir: Path | None) -> list[str]:
    """Return the broker addresses of the user's cluster."""
    from embarcadero.client.arguments import broker_addresses
    from embarcadero.errors import NotRunning

    if brokers:
        return [address.strip() for address in brokers.split(",") if address.strip()]
    config = settings()
    if config.client.brokers and data_dir is None:
        return config.client.brokers
    if sys.platform != "linux" and data_dir is None:  # clients run here, clusters do not
        return broker_addresses(config)
    from embarcadero.node.folder import ClusterFolder
    from embarcadero.node.report import report

    try:
        return report(ClusterFolder(data_dir_or_default(data_dir))).addresses or broker_addresses(config)
    except NotRunning:
        if data_dir is not None or config.cluster.data_dir:
            raise  # the user named this cluster: do not fall back to another one on this machine
        return broker_addresses(config)


def connect(brokers: str | None, data_dir: Path | None) -> Log:
    """Connect to the user's cluster."""
    import embarcadero

    return embarcadero.connect(find_brokers(brokers, data_dir), config=settings())


def print_json(value: Any) -> None:
    """Print a JSON document on standard output."""
    import msgspec

    print(msgspec.json.encode(value).decode())


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on standard output. No cell is ever cut.

    On a terminal, long cells wrap. A table with too many columns for the terminal becomes a block of lines for each
    row. Elsewhere, each row is one line of plain text as wide as it needs to be, and an empty cell is `-`.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        print("\n".join([title] * bool(title) + _plain_lines(columns, cells)))
        return
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    console = Console(markup=False, highlight=False)
    table = Table(title=title or None, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in cells:
        table.add_row(*row)
    if Measurement.get(console, console.options.update(width=_WIDTH_MAX), table).minimum <= console.width:
        console.print(table)
    else:
        print("\n".join(_blocks(title, columns, cells)))


_WIDTH_MAX = 100_000


def _plain_lines(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a header and one line for each row, in columns."""
    lines = [list(columns), *([" ".join(cell.split()) or "-" for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _blocks(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the first cell of each row, and below it a line for each other cell that is not empty."""
    width = max(map(len, columns))
    lines = [title] * bool(title)
    for first, *rest in rows:
        lines.append(f"{columns[0]} {first}" if columns[0] not in first else first)
        lines += [f"  {name.ljust(width)}  {cell}" for name, cell in zip(columns[1:], rest, strict=True) if cell]
    return lines


READER_COLUMNS = ["reader", "lane: seq", "lag in records", "seconds ago"]


def reader_row(reader: ReaderProgress) -> list[object]:
    """Return a reader with its reported progress, as a row of READER_COLUMNS."""
    positions = ", ".join(f"{lane}: {seq}" for lane, (_, seq) in sorted(reader.places.items()))
    return [reader.reader, positions, "?" if reader.lag is None else reader.lag, f"{reader.ago_s:.0f}"]


def note(text: str) -> None:
    """Print a line for people on standard error."""
    typer.secho(text, err=True, fg=typer.colors.YELLOW)


def print_error(error: BaseException, options: Mapping[str, str] | None = None) -> None:
    """Print an error in one red line, and its hint. `options` are those of the command, by their Python names."""
    if isinstance(error, EmbarcaderoError):
        typer.secho(f"error: {in_shell_words(error.message, options or {})}", err=True, fg=typer.colors.RED)
        if error.hint:
            typer.secho(f"hint: {in_shell_words(error.hint, options or {})}", err=True)
        typer.secho(f"see: {error.page}", err=True)
    else:
        typer.secho(f"error: {type(error).__name__}: {error}", err=True, fg=typer.colors.RED)
        typer.secho("hint: this is a bug of Embarcadero; EMBARCADERO_DEBUG=1 prints the traceback", err=True)


_ARGUMENT = re.compile(r"(?<![\w.])([a-z]+(?:_[a-z]+)*)=(?=[\w.'\"])")


def in_shell_words(text: str, options: Mapping[str, str]) -> str:
    """Return a message of the client with arguments of Python as options of the command line.

        in_shell_words("use ack=1", {"ack": "--ack"})    # use --ack 1
    """
    return _ARGUMENT.sub(lambda found: f"{options[found[1]]} " if found[1] in options else found[0], text)


def option_names(app: Any, arguments: Collection[str]) -> dict[str, str]:
    """Return the options of the command that these arguments call, by their Python names.

    The options of `topic create` are included, because hints explain how to create a topic.
    """
    return _options(app, ("topic", "create")) | _options(app, arguments)


def _options(command: Any, arguments: Collection[str]) -> dict[str, str]:
    for argument in arguments:
        command = getattr(command, "commands", {}).get(argument, command)
    found: dict[str, str] = {}
    for parameter in getattr(command, "params", ()):
        if flag := next((flag for flag in parameter.opts if flag.startswith("--")), ""):
            found[parameter.name] = found[flag[2:].replace("-", "_")] = flag
    return found


def duration_option(own: float = 1.0, least: float = 0.0, most: float = float("inf")) -> Callable[[Any], float]:
    """Return a parser of an option that takes a duration; a plain number is in units of `own` seconds."""

    def parse(text: Any) -> float:
        from embarcadero.config.key import BadQuantity, duration

        try:
            value = duration(text, own)
        except BadQuantity as error:
            raise typer.BadParameter(f"{error.what}; {error.right}") from None
        if not least <= value <= most:
            unit = "s" if own >= 1 else "ms"
            bound = f"at least {least:g} {unit}" if most == float("inf") else f"{least:g} to {most:g} {unit}"
            raise typer.BadParameter(f"{text} is out of range; use {bound}")
        return value

    return parse


def stderr_is_terminal() -> bool:
    """Whether to show a progress bar."""
    return sys.stderr.isatty()


TIER_COLUMNS = ("table", "below index", "below seq", "lag", "last moved", "holder", "engine")


def tier_facts(tier: Tier | None, end: Tail) -> dict[str, Any] | None:
    """The progress of a topic's table: sums over its lanes, and the number of durable records not in it yet."""
    if tier is None:
        return None
    lanes = end.lanes or (end,)
    index, seq = (sum(tier.frontier(lane.lane)[part] for lane in lanes) for part in (0, 1))
    lag = sum(lane.records(max(lane.start_seq, tier.frontier(lane.lane)[1]), lane.durable_seq) for lane in lanes)
    ago_s = max(0.0, time.time() - tier.advanced_us / 1e6) if tier.advanced_us else None
    return {
        "table": tier.table,
        "index": index,
        "seq": seq,
        "lag": lag,
        "ago_s": ago_s,
        "holder": tier.holder,
        "epoch": tier.epoch,
        "metadata": tier.metadata,
        "engine": tier.engine,
    }


def tier_row(facts: dict[str, Any]) -> list[object]:
    """Format these facts as a row of TIER_COLUMNS."""
    ago = "never" if facts["ago_s"] is None else f"{facts['ago_s']:.0f} s ago"
    return [facts["table"], facts["index"], facts["seq"], facts["lag"], ago, facts["holder"], facts["engine"]]


# --- settings ---------------------------------------------------------------------------------------------------------
# The configuration of a command: --config FILE (or the default files) < environment < options.
Verb = TypeVar("Verb", bound=Callable[..., Any])
OptionValues = Mapping[str, tuple[str, Any]]
"""Options by the configuration key that they set: the option's name, and its value or None."""

_file: ContextVar[Path | None] = ContextVar("file", default=None)
_HELP = "Configuration. Default: $EMBARCADERO_CONFIG, ./embarcadero.yaml, ~/.config/embarcadero/embarcadero.yaml."
_OPTION = Annotated[Path | None, typer.Option("--config", show_default=False, metavar="FILE", help=_HELP)]


class Verbs(typer.Typer):
    """Commands. Commands that work with a cluster also get --config."""

    def command(self, *arguments: Any, **options: Any) -> Callable[[Verb], Verb]:
        """Register a command, like typer."""
        register = super().command(*arguments, **options)

        def decorate(function: Verb) -> Verb:
            register(with_config(function))
            return function

        return decorate


def with_config(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option --config before --json to a function that works with a cluster (--data-dir)."""
    signature = inspect.signature(function, eval_str=True)
    parameters = dict(signature.parameters)
    if "data_dir" not in parameters:
        return function

    @functools.wraps(function)
    def run(*arguments: Any, config: Path | None = None, **options: Any) -> Any:
        token = _file.set(config)
        try:
            return function(*arguments, **options)
        finally:
            _file.reset(token)

    last = [parameters.pop("json")] if "json" in parameters else []
    added = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_OPTION)
    every = [*parameters.values(), added, *last]
    every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in every]
    run.__signature__ = signature.replace(parameters=every)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
    return run


def resolved(flags: OptionValues | None = None, *, file: Path | None = None, base: Config | None = None) -> Resolved:
    """Read all sources of the configuration, with their problems."""
    from embarcadero.config.sources import as_given, resolve, which_file
    from embarcadero.config.table import DEFAULTS

    given = {key: as_given(key, value, name) for key, (name, value) in (flags or {}).items() if value is not None}
    return resolve(which_file(file or _file.get(), search=True), given, base=base or DEFAULTS)


def settings(flags: OptionValues | None = None, *, base: Config | None = None) -> Config:
    """Return the configuration of this command. Raise BadConfiguration with all problems."""
    return resolved(flags, base=base).config()
