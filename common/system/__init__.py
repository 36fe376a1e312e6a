"""This computer and its processes: memory, load, children, locks. Knows nothing of the suite. No
torch."""
