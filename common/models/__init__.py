"""What is measured: whole models and encoders."""
