"""From logits to tokens: every request's own parameters, in one batched pass.

It knows rows and what each asks for. Why a row is in the batch, it does not know.
"""
