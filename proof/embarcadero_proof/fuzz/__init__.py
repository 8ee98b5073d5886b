"""Hostile and damaged inputs for every decoder and for recovery, made by mutation of real ones."""
