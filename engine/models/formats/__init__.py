"""The forms in which the weights of linear layers are held: one file and one class for each.

An instance of the class is one packed weight: it packs, multiplies, and reads rows. The class says
where it serves and what it takes. Nothing else knows which formats there are (`registry`).
"""
