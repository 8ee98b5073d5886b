"""The broker's door: connections, requests, sockets."""
