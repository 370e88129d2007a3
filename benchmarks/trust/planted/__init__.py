"""Part `planted`: faults that are put in on purpose, and must be caught.

    plants ──the plugin applies one──▶ the tests that ought to fail        (most)
           ──`serve` applies one─────▶ a server, and a witness beside it   (what tests cannot see)

What catches nothing proves nothing: a plant that is not caught is a fault of the campaign.
"""
