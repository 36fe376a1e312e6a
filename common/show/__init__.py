"""Make the HTML page, the summaries for TensorBoard, and a trace in Perfetto.  No torch."""
