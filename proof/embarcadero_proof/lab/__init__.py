"""Benchmarks: always as ratios to the raw speed of this machine, in the same run, repeated, with their spread."""
