"""The way in: admission, the log and the pending ring, lanes of the broker's own."""
