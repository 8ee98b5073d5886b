"""Clients: sans-I/O cores (publisher, subscriber) and the drivers that give them sockets (aio, sync)."""
