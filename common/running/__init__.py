"""A run: planning jobs, starting each in its own process and Python, keeping what they measured."""
