"""Placement: topics, ranges, members and epochs in one small transactional store. See README.md."""
