"""What torch.profiler wrote, read in bounded memory.  No torch here."""
