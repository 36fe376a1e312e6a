"""The words that every folder speaks: settings, implementations, errors, text, units, tables.  Standard library."""
