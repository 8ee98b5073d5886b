"""What the cores of publishers and readers have in common: connections hand them what came for them."""

from __future__ import annotations


class ClientCore:
    """A state machine without I/O: a publisher, or a reader of one lane or of several."""
