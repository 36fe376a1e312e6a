"""Measure whether a speech model is faster than real time."""
