"""Measure inference of speech models, and of pipelines of stages."""
