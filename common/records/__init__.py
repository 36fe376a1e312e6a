"""What lies on disk: its schema, the store, the folder of a run with its lock.  No torch here."""
