"""Simulator, chaos tests, fuzzers and benchmarks of Embarcadero. Neither the product nor the wheel contains it."""
