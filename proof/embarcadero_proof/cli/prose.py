"""prose: how plain the repository's text is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from embarcadero.cli.output import Json


def prose(
    paths: Annotated[
        list[Path] | None, typer.Argument(show_default=False, help="Files or folders to list line by line.")
    ] = None,
    lower: Annotated[
        bool, typer.Option("--lower", help="Make today's measures the limits of the test where they are lower.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure how plain the text is: constructions of the old dialect per 1,000 words, for each folder.

    Examples:

        embarcadero-proof prose

        embarcadero-proof prose docs src/embarcadero/broker

        embarcadero-proof prose --lower
    """
    from embarcadero.cli.output import print_json
    from embarcadero_proof.prose import by_folder, findings, texts
    from embarcadero_proof.prose import lower as lower_limits

    if paths:
        chosen = {path.resolve() for path in paths}
        for path in texts():
            shown = os.path.relpath(path)
            for number, name, words in findings(path) if chosen & {path, *path.parents} else ():
                print(f"{shown}:{number}: {words} ({name})")
        return
    if lower:
        lower_limits()
    found = by_folder()
    if json:
        print_json({name: round(each.per_thousand, 2) for name, each in found.items()})
        return
    print(f"{'folder':<32} {'words':>7} {'per 1,000':>9}  most")
    for name, each in found.items():
        most = ", ".join(f"{what} ({count})" for what, count in each.found.most_common(3))
        print(f"{name:<32} {each.words:>7,} {each.per_thousand:>9.1f}  {most}")
