"""What runs a step: it lays a batch out, computes it, samples, and copies blocks. Nothing else uses
the device while an engine runs; `engine.loading` prepares everything that this needs.

It knows a batch as it was decided, not why; and no text.
"""
