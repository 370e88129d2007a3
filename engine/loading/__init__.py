"""A model's way from its checkpoint to its first step.

    checkpoint ─▶ model ─▶ view, with our attention ─▶ gate: compared with the model itself
        ─▶ our decoder (engine.models), or packed linear layers ─▶ compared again
        ─▶ memory: the KV cache's size ─▶ compiled, if that is wanted ─▶ a runner (engine.runner)

Here a model that would be run incorrectly is refused; a step later finds everything decided.

It knows no request and no schedule: what it makes is handed to the wiring (`engine.assembly`).
"""
