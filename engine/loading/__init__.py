"""Everything from a model's checkpoint to its first step.

    checkpoint ─▶ model ─▶ view, with our attention ─▶ gate: compared with the model itself
        ─▶ our decoder (engine.models), or packed linear layers ─▶ compared again
        ─▶ memory: the KV cache's size ─▶ compiled, if requested ─▶ a runner (engine.runner)

This package refuses any model that would run incorrectly, so steps need no further checks. It knows
nothing about requests or scheduling. Its results are handed to `engine.assembly`.
"""
