"""The simulator: one seed, one run. Production role code runs on unreliable memory, networks and clocks."""
