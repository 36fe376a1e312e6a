"""Flags in, exit code out: the commands of the loss run, and what all commands share."""
