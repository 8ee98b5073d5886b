"""The simulator: one seed, one world. The role code of production on memory, networks and clocks that misbehave."""
