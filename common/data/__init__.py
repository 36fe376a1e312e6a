"""Shape files, and the batches drawn from them."""
