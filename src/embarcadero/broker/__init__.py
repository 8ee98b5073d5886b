"""The broker: takes batches into shared memory, relays outcomes, serves reads. It orders only its own lanes."""
