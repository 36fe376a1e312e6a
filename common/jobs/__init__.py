"""From settings to processes to records. Knows no loss and no torch."""
