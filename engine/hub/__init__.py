"""Models that come from a hub: which are here, what one would bring, and how it comes.

repository ── what the hub has, which files are used, what its refusals mean
fetching   ── the bytes, resumed and checked
cache      ── the directories on this disk, which huggingface_hub's own commands read too

It knows files and their digests. What a model is, `engine.loading` knows.
"""
