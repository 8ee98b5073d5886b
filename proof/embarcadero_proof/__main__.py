"""`python -m embarcadero_proof`."""

from embarcadero_proof.cli.main import main

main()
