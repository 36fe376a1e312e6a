"""Profile a training step of a model: measure, records, rows, table, plot, section, command."""
