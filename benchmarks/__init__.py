"""Measurements: named workloads, paired runs, and one results format."""
