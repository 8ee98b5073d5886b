"""The replica role: follows lanes, keeps ranges on disk, reports how far they are durable. See README.md."""
