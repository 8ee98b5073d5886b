"""The two faces of the client: asyncio is the source, the one for threads is generated from it."""
