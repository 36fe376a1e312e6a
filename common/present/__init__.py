"""Define tables, figures and sections of a page.  Knows no record."""
