"""What a model will need and how fast it will be, computed before its weights are loaded."""
