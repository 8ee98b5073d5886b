"""Hostile and damaged inputs for every decoder and for recovery, by mutation of real ones."""
