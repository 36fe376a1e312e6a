"""This computer and its processes: memory, load, children, locks.  Knows nothing of this suite; no torch."""
