"""The fabric: named regions of shared memory in which every line has one writer for life.

Four primitives work on them: flush, invalidate, fence, and aligned 8-byte load / store. Roles publish everything here:
64-byte entries in rings, frontiers, and payloads in broker logs. There are no locks and no atomics between hosts. See
README.md.
"""
