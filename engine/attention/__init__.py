"""Attention over the paged KV cache: the interface to the models, and the backends."""
