"""Counts the operations of a model. Can be taken out of the suite and used alone."""
