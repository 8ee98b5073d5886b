"""Measurements: always as ratios to what this machine can do raw, in the same run, repeated, with their spread."""
