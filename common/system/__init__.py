"""This computer and its processes: memory, load, children. Knows nothing of the suite. No torch."""
