"""Processes: a node hosts roles, a supervisor keeps nodes running. See README.md."""
