"""The sequencer: turns the entries that brokers publish into one order per lane."""
