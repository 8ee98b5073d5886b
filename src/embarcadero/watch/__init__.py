"""Watching: metrics, health, logs, `top` and `inspect`. See README.md."""
