"""Types of tables, plots and sections, and how they are written as text, CSV and JSON; no records,
no torch."""
