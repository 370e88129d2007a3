"""Decides which requests run in the next step, and how many tokens of each. Pure policy, no
tensors.

    Scheduler.schedule ─▶ ScheduledBatch ─▶ the core launches it (`runner_protocol`)

This package uses the KV cache's bookkeeping and the callers of requests. It knows neither the
device nor text, and does not import torch.
"""
