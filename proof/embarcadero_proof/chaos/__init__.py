"""Chaos tests: real processes run under load and are killed; all promises are checked."""
