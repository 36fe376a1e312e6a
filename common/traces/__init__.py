"""Reads the traces of torch.profiler.  No torch."""
