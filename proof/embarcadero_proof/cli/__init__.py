"""The command line of the proof: `embarcadero-proof`."""
