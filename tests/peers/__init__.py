"""Measurements beside other systems, which are started from their own packages: `make peers`."""
