"""Rows in words: terminal, Markdown, CSV, JSON."""
