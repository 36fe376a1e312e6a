"""What is measured: a loss, its inputs, its joiner, and the float64 oracle that judges it."""
