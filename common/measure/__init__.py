"""The instruments: they take a step that can run, and know no loss.  torch."""
