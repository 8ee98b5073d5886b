"""The audit: promises P1, P2, P3 and P7 looked at over a whole log, span by span and session by session."""
