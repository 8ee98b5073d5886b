"""Clients: sans-I/O cores of publishers and readers, the drivers that give them sockets, and two faces of one API."""
