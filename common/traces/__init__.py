"""Reads the traces of torch.profiler in bounded memory. No torch."""
