"""Attention over the paged KV cache: the interface to the models, and the backends.

It knows shapes, block tables and slots; whose they are, it does not know.
"""
