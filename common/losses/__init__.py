"""What is measured: adapters, the joiner and its random inputs, and the float64 reference they are judged by."""
