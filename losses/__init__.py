"""Adapters of one loss each, which run as scripts: ./losses/benchmark_nemo.py; the others lie at
the top level."""
