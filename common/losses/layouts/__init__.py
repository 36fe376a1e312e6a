"""What a loss takes: a class for each way, which makes it, knows what is right, and how that is checked."""
