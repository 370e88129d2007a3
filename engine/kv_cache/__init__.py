"""Bookkeeping of the paged KV cache: which blocks each request holds.

This package has no tensors and does not use torch; it plans copies, but does not make them. It sees
requests as sequences of tokens and sets no policy: the scheduler decides which request gives up its
blocks.
"""
