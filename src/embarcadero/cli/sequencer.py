"""sequencer hand-over."""

from __future__ import annotations

from typing import Annotated

import typer

from embarcadero.cli.output import DataDir, Json, data_dir_or_default, print_json
from embarcadero.cli.settings import Verbs

app = Verbs(help="Move the sequencer to another process.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def about() -> None:
    """Move the sequencer to another process.

    One sequencer reigns; others stand by (`up --standbys`), and one of them takes over at once when it dies.
    `embarcadero status` shows which is which.
    """


@app.command("hand-over")
def hand_over(
    to: Annotated[
        int | None, typer.Option(show_default=False, help="Number of the one that shall reign. Default: any.")
    ] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Let a sequencer that stands by take over from the one that reigns, in order.

    Nobody has to wait for a failure to be noticed: the one that stands by prepares while the other still works, and
    publishers and readers see a pause of some milliseconds and no error. The one that reigned stands by afterwards. Use
    it before you work on the machine, the core or the process of a sequencer.

    Examples:

        embarcadero sequencer hand-over

        embarcadero sequencer hand-over --to 1 --json
    """
    from embarcadero.node.cluster import ClusterFolder
    from embarcadero.node.hand_over import hand_over as carry_out

    done = carry_out(ClusterFolder(data_dir_or_default(data_dir)), to)
    if json:
        print_json(done)
    else:
        took = done.seconds * 1_000
        print(f"sequencer {done.now} reigns now, in epoch {done.epoch}; before, sequencer {done.before}; {took:.0f} ms")
