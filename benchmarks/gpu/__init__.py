"""`python -m benchmarks gpu`: checks, then measurements, on one CUDA device."""
