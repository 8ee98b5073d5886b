"""Faults of real processes: steps at which a role stops, kills or delays itself, and disks whose syncs fail."""
