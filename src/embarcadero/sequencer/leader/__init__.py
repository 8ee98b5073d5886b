"""Lead: elections, the takeover, the rounds, and what is done between them."""
