"""The four passes (correctness, timing, memory, trace), each from a context to records; torch, no files but traces."""
