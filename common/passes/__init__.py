"""The passes (correctness, timing, memory, trace; probe and throughput of --find-largest), each from a context to
records; torch, no files but traces.
"""
