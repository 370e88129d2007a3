"""From logits to tokens: samples all rows in one batched pass, each by its request's parameters.

This package knows rows and their sampling parameters, but not why a row is in the batch.
"""
