"""The broker: takes batches from sockets into shared memory, relays outcomes, serves reads. It never orders."""
