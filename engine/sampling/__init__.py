"""From logits to tokens: every request's own parameters, in one batched pass."""
