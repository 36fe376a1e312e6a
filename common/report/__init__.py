"""Rows and samples to one HTML page (and PNGs): collect -> verdicts, figures -> page.  Never imports torch."""
