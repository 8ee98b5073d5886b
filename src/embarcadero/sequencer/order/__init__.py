"""Turn batches into the order of a lane: sessions, windows, the reorder buffer, checkpoints, the order ring."""
