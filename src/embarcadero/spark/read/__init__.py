"""Reads: a batch or a stream becomes spans, and tasks read these. No code of writes is loaded."""
