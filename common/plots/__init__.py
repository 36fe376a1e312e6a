"""Rows as figures, which are data; the page draws them, or png does."""
