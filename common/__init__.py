"""What the benchmark scripts share.

One way for the data: shape_info.pt -> shapes -> batching -> inputs -> adapter.prepare -> a pass (correctness, timing,
memory, trace) -> records on disk -> statistics -> table.  Nothing flows back.  README.md has the diagram.
"""
