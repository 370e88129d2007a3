"""Models from a hub: which ones are on this machine, what a download involves, and the download
itself.

repository ── what the hub has, which files are used, what its refusals mean
fetching   ── the bytes, resumed and checked
cache      ── the directories on this disk, which huggingface_hub's own commands read too

This package handles files and their digests. `engine.loading` handles the models themselves.
"""
