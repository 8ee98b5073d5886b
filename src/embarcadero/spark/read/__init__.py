"""Reads: a batch or a stream is cut into spans, which tasks read. Does not import the code of writes."""
