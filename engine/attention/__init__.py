"""Attention over the paged KV cache: the interface to the models, and the backends.

This package handles shapes, block tables and slots. It knows nothing about requests.
"""
