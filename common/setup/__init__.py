"""Environments: which Python has which package, what is compiled, how users install the rest."""
