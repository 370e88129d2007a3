"""Decoders of our own: their description, and what computes them."""
