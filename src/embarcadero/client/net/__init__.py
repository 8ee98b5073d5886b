"""Connections to brokers, and what the cores of publishers and readers see of them."""
