"""The replica role: follows lanes, keeps ranges on disk, counts what is durable. See README.md."""
