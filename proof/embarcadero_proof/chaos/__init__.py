"""Real trouble for real processes: load runs, everything is killed, and what was promised is checked."""
