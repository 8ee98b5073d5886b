"""config show, check, reference, example: the values and their origins, problems, and all keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embarcadero.cli.output import Json, note, print_json, print_table, resolved
from embarcadero.errors import BadValue

if TYPE_CHECKING:
    from embarcadero.config.sources import Resolved

HELP = """
Show and check the configuration: embarcadero.yaml < environment < options.

The file is --config, else $EMBARCADERO_CONFIG, else ./embarcadero.yaml, else ~/.config/embarcadero/embarcadero.yaml.
Variables are named EMBARCADERO_<SECTION>_<KEY>.
"""

app = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", show_default=False, metavar="FILE", help="The file to read.")
]


@app.command()
def show(
    section: Annotated[str | None, typer.Option(show_default=False, help="Only this section, such as broker.")] = None,
    config: ConfigFile = None,
    json: Json = False,
) -> None:
    """Print every value and its origin: a file with the line, a variable, or the default. Secrets are masked.

    Examples:

        embarcadero config show --section broker

        EMBARCADERO_BROKER_PORT=9000 embarcadero config show --json
    """
    from embarcadero.config.secrets import masked
    from embarcadero.config.table import KEYS, SECTIONS

    if section is not None and section not in SECTIONS:
        raise BadValue(f"there is no section {section!r}", f"use {', '.join(SECTIONS)}")
    found = resolved(file=config)
    found.config()
    keys = {full: key for full, key in KEYS.items() if section in (None, key.section)}
    if json:
        print_json([_fact(full, key, found) for full, key in keys.items()])
        return
    rows = [
        [full, key.show(masked(full, found.values[full])) or f"({key.rule.default_text})", found.origins[full]]
        for full, key in keys.items()
    ]
    print_table(f"configuration ({found.file or 'no file'})", ["key", "value", "from"], rows)


def _fact(full: str, key: Any, found: Resolved) -> dict[str, Any]:
    from embarcadero.config.secrets import masked

    return {
        "key": full,
        "value": masked(full, found.values[full]),
        "unit": key.unit,
        "default": key.default,
        "from": found.origins[full],
    }


@app.command()
def check(
    file: Annotated[
        Path | None, typer.Argument(show_default=False, help="The file to check. Default: the file in use.")
    ] = None,
    json: Json = False,
) -> None:
    """Check a file and the environment: print every problem with its location, and exit with 1 if there is any.

    Examples:

        embarcadero config check

        embarcadero config check production.yaml
    """
    from embarcadero.config.sources import DEFAULT

    found = resolved(file=file)
    changed = sum(origin != DEFAULT for origin in found.origins.values())
    where = str(found.file) if found.file else None
    if json:
        problems = [problem._asdict() for problem in found.problems]
        print_json({"file": where, "ok": not problems, "set": changed, "problems": problems})
    elif found.problems:
        for problem in found.problems:
            print(problem)
        note(f"{len(found.problems)} problems; `embarcadero config reference` lists every key")
    else:
        what = f"{where} and the environment are" if where else "there is no file; the environment is"
        print(f"{what} valid: {changed} values are set, the others have their defaults")
    if found.problems:
        raise typer.Exit(1)


@app.command()
def reference() -> None:
    """Print the reference of all keys, as Markdown.

    Example:

        embarcadero config reference > docs/configuration.md
    """
    from embarcadero.config.reference import page

    print(page(), end="")


@app.command()
def example() -> None:
    """Print an embarcadero.yaml with every key, commented out, with its default and meaning.

    Example:

        embarcadero config example > embarcadero.yaml
    """
    from embarcadero.config.reference import example_file

    print(example_file(), end="")
