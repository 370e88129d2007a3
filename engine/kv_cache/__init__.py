"""Bookkeeping of the paged KV cache: which blocks each request holds. Plans only: no tensor is
touched here.
"""
