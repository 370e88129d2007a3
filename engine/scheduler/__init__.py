"""Which requests run in the next step, and how many tokens of each: pure policy, no tensors."""
