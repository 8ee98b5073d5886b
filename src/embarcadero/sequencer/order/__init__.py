"""Order the batches of a lane: sessions, windows, the reorder buffer, checkpoints, the order ring."""
