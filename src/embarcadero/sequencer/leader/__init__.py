"""Lead: elections, the takeover, the rounds, and the work between rounds."""
