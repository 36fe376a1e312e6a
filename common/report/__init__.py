"""The HTML page, the summaries for TensorBoard, a trace in Perfetto. No torch."""
