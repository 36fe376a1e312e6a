"""Rows as plots, and one offline page of them and of what the tools measured."""
