"""Draw rows of loss runs as figures, for the page and for PNG files."""
