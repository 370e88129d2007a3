"""Bookkeeping of the paged KV cache: which blocks each request holds. No tensors here; copies are
only planned.
"""
