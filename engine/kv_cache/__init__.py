"""Bookkeeping of the paged KV cache: which blocks each request holds. No tensors here; copies are
only planned.

It knows requests by their tokens, and follows no policy: which request gives up its blocks, the
scheduler says. No torch.
"""
