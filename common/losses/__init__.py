"""A loss, its inputs, its joiner, the float64 oracle that judges it, and the passes."""
