"""Bugs that are injected on purpose, to show that tests, seeds and scopes catch them."""
