"""The fabric: named regions of shared memory in which every line has one writer for life, and four primitives over them
(flush, invalidate, fence, aligned 8-byte load / store). All that roles publish goes through here, as 64-byte
entries in rings, as frontiers, and as payloads in broker logs; no locks, no atomics between hosts. See README.md.
"""
