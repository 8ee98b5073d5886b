"""Range storage: a replica's files, and how other processes read them."""
