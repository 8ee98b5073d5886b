"""The simulator: one seed, one run. The role code of production on memory, networks and clocks that misbehave."""
