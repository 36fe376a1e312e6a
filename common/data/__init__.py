"""From the shape file to the batches of a run."""
