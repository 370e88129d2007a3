"""The engine's loop: commands come from an inbox; a step is scheduled, launched and collected; its
results go to one sink.

    inbox ─▶ loop ─▶ admission ─▶ EngineCore.step: schedule, launch, collect ─▶ step_results ─▶ sink

It decides when something happens; the scheduler decides what is in a step, and the runner computes
it. It knows neither the model nor the device: a scripted runner can stand in. No torch.
"""
