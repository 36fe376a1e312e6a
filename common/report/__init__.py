"""What is looked at in a browser: the page, TensorBoard's summaries, one trace in Perfetto.  No torch."""
