"""The command line: `embarcadero <verb>`. Each verb imports its modules when it runs, so that `--help` is fast."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from embarcadero.cli import (
    bench,
    cluster,
    config,
    inspect,
    pipeline,
    records,
    topic,
)
from embarcadero.cli.output import Verbs, option_names, print_error
from embarcadero.errors import EmbarcaderoError, UsageError, clusters_need_linux

HELP = """
A distributed shared log: publish to any broker, read one total order.

First steps:

    embarcadero up --detach                    # 4 brokers and a sequencer on this machine

    embarcadero topic create orders --order 5

    seq 1 1000 | embarcadero publish orders

    embarcadero tail orders --limit 3

    embarcadero status

    embarcadero down
"""


def debugging() -> bool:
    """Whether the user wants tracebacks."""
    return os.environ.get("EMBARCADERO_DEBUG", "") not in {"", "0"}


_LINUX_MODULES = {"fcntl", "pwd", "resource", "uvloop"}
"""Modules that clusters need and that other systems do not have."""


class Commands(TyperGroup):
    """All verbs. A typed error is printed in one line, with exit code 2 for a mistake of the user, else 1."""

    def invoke(self, ctx: Any) -> Any:
        arguments = [*getattr(ctx, "_protected_args", ()), *ctx.args]
        try:
            return super().invoke(ctx)
        except EmbarcaderoError as error:
            if debugging():
                raise
            print_error(error, option_names(self, arguments))
            raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error
        except ModuleNotFoundError as error:
            if debugging() or error.name not in _LINUX_MODULES:
                raise
            print_error(clusters_need_linux())
            raise typer.Exit(1) from error


app = Verbs(
    cls=Commands,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from embarcadero import __version__

        print(f"embarcadero {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version, and end.")
    ] = False,
) -> None:
    """Take the options before the verb."""


app.command()(cluster.up)
app.command()(cluster.down)
app.command()(cluster.node)
app.command()(cluster.status)
app.command()(inspect.top)
app.add_typer(topic.app, name="topic")
app.add_typer(cluster.replicas, name="replica")
app.add_typer(cluster.sequencer, name="sequencer")
app.add_typer(inspect.app, name="inspect")
app.command()(inspect.verify)
app.command()(records.publish)
app.command()(records.tail)
pipeline.app.command()(pipeline.audit)
pipeline.app.command()(pipeline.compact)
pipeline.app.command()(pipeline.replay)
pipeline.app.command()(pipeline.load)
pipeline.app.command()(pipeline.run)
app.add_typer(pipeline.app, name="pipeline")
app.command()(pipeline.sql)
app.add_typer(config.app, name="config")
app.command()(bench.bench)
app.command()(cluster.demo)


def run(app: typer.Typer) -> None:
    """Run a command line. Print an uncaught error in one line, and exit with code 1."""
    try:
        app()
    except Exception as error:
        if debugging():
            raise
        print_error(error)
        raise SystemExit(1) from None


def main() -> None:
    """Entry point of the `embarcadero` program."""
    run(app)


if __name__ == "__main__":
    main()
