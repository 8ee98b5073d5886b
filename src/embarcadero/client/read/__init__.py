"""From fetches to batches: readers of lanes, spans and tables."""
