"""One pass each: a context in, records out."""
