"""The audit: checks promises P1, P2, P3 and P7 over a whole log, span by span and session by session."""
