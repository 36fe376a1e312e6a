"""Show rows of loss runs as text: terminal, Markdown, CSV, JSON."""
