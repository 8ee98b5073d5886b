"""Writes: tasks stage batches, the driver commits them."""
