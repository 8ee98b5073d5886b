"""The protocol between clients and brokers. See README.md in this folder, and docs/protocol.md."""
