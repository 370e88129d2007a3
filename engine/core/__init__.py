"""The engine's loop: takes commands from an inbox; schedules, launches and collects steps; and
sends their results to one sink.

    inbox ─▶ loop ─▶ admission ─▶ EngineCore.step: schedule, launch, collect ─▶ step_results ─▶ sink

This package decides when things happen. The scheduler decides what a step contains, and the runner
computes it. This package depends on neither the model nor the device, so a scripted runner can
replace the real one. It does not use torch.
"""
