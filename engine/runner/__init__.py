"""Runs steps: prepares a batch's inputs, computes them, samples, and copies blocks.

Nothing else uses the device while an engine runs. `engine.loading` prepares everything that this
package needs. The package only executes scheduled batches: it neither makes scheduling decisions
nor handles text.
"""
