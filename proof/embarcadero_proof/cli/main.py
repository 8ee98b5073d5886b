"""`embarcadero-proof <verb>`: the simulator, chaos, fuzzers and benchmark laboratory."""

from __future__ import annotations

from embarcadero.cli.main import Commands, run
from embarcadero.cli.output import Verbs
from embarcadero_proof.cli import chaos, proof, prose

HELP = """
Test and measure Embarcadero: simulated clusters, real clusters with faults, hostile inputs, benchmarks.

    embarcadero-proof sim --seeds 0:100        # simulated clusters on incoherent memory, bad networks and disks

    embarcadero-proof sim --bugs             # injected bugs: each must be caught

    embarcadero-proof chaos matrix --list      # named cases of faults of real processes

    embarcadero-proof fuzz --seconds 10        # damaged and hostile inputs for every decoder

    embarcadero-proof bench --quick            # figures as ratios to the raw limits of this machine
"""

app = Verbs(
    cls=Commands,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(proof.sim)
app.command()(proof.fuzz)
app.command()(proof.bench)
app.command()(proof.structure)
app.command()(prose.prose)
app.add_typer(chaos.app, name="chaos")


def main() -> None:
    """Entry point of the `embarcadero-proof` program."""
    run(app)


if __name__ == "__main__":
    main()
