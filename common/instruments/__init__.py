"""Clocks and memory counters around a step. Knows no loss. Imports torch."""
