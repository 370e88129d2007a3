"""Our own decoders: their descriptions, and the code that computes them.

They depend only on tensors and the attention interface. `engine.loading` decides whether a decoder
may replace a model, by comparing the two.
"""
