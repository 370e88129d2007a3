"""`python -m benchmarks gpu`: checks, then figures, on one CUDA device."""
