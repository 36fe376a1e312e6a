"""Environments and compiled extensions: what `make setup` makes, and which Python each implementation needs."""
