"""The way out: one answer to where a batch is, from memory, disk, or a table."""
