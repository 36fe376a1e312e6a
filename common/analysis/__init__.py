"""Records read back as rows, and what follows from them.  No torch, no numpy."""
