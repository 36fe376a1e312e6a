"""The words that every folder speaks: settings, implementations, errors, text, units, tables; files that are written
whole.  Standard library."""
