"""Range storage: what a replica keeps on its disk, and how others read it."""
