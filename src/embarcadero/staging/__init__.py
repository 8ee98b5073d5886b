"""Writes that appear as a whole: staged in a hidden topic, decided by one compare-and-move, published by reference."""
