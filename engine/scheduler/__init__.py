"""Which requests run in the next step, and how many tokens of each: pure policy, no tensors.

    Scheduler.schedule ─▶ ScheduledBatch ─▶ the core launches it (`runner_protocol`)

It knows the KV cache's bookkeeping and the callers of requests. It knows neither the device nor
text. No torch.
"""
