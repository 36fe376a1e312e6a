"""Count the operations of a model: measure, records, rows, table, section, command."""
