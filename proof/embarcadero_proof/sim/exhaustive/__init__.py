"""All interleavings of small scopes of the protocols, over memory that is as bad as the rules allow."""
