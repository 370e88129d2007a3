"""Attention over the paged KV cache: the seam to the models, and the backends behind it."""
