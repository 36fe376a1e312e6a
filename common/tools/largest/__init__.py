"""Find the largest batch that fits into memory, of a loss or of a whole training: command, measure,
rows."""
