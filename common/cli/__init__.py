"""Flags in, exit code out; decides what follows a run."""
