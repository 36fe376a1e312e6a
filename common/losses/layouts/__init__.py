"""Define the layouts: the kinds of input that a loss takes, how each is made, and the right answer for it."""
