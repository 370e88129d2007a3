"""Part `planted`: faults that are planted on purpose and must be caught.

    plants ──the plugin applies one──▶ the tests that ought to fail        (most)
           ──`serve` applies one─────▶ a server, and a witness beside it   (what tests cannot see)

A plant that is not caught means that the checks are too weak.
"""
