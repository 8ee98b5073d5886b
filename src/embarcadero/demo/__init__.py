"""`make demo`: the log under kill -9 (durable.py), then the whole pipeline on Spark (pipeline.py) with a report."""
