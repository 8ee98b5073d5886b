"""What travels between clients and brokers. See README.md here, and docs/protocol.md."""
