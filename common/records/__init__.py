"""The files of a run: their schema, reading and writing, the lock of a folder. No torch."""
