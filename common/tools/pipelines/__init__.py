"""Measure what an utterance costs in a speech system of several stages."""
