"""Decoders of our own: their description, and what computes them.

They know tensors and the interface of attention. Whether one may serve in the place of a model is
decided in `engine.loading`, by a comparison with that model.
"""
