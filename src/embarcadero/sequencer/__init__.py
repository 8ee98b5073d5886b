"""The sequencer: turns what brokers publish into one order per lane."""
