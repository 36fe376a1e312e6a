"""Settings, implementations, errors, text and units, which every folder uses. Standard library
alone."""
