"""Which Python has which package, and how it gets there: environments, what is compiled, how users install it."""
