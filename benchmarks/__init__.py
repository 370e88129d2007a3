"""Measurements: named workloads, paired runs, one results format."""
