"""The digests of model classes' sources that our decoder was compared with.

Written by scripts/decoder_digests.py.
"""

VERSIONS = ("5.23.0",)
"""The versions of transformers that they were taken from."""

DIGESTS: dict[str, tuple[str, ...]] = {
    "cohere": ("67bcd394b1ad95ca",),
    "cohere2": ("871ad8d397f0df8d",),
    "cwm": ("18949cd5625e8ad9",),
    "exaone4": ("6f24fc9084e5a5e2",),
    "gemma": ("32c1f0a2285bc354",),
    "gemma2": ("c8e9f6de9fc1bd9f",),
    "gemma3_text": ("5859e7d7762d5f0c",),
    "glm": ("96d964af1e87e18e",),
    "glm4": ("c58d3343006a07f9",),
    "granite": ("fdfd2013743415a5",),
    "helium": ("d3796aab81c7f649",),
    "llama": ("55d17129a2bbd7b5",),
    "ministral": ("bd1735517d1d5f15",),
    "mistral": ("4ed23e30e38e8730",),
    "olmo2": ("1f855f58a2c5234b",),
    "olmo3": ("ff89de6cd3967a9b",),
    "phi3": ("6e475b39392ea912",),
    "qwen2": ("58c002740f625991",),
    "qwen3": ("f0189112ac2a06ea",),
    "seed_oss": ("f47bb9c3f083265e",),
    "smollm3": ("86bc8e85af8b0d09",),
    "starcoder2": ("aa62994a13d6a4a0",),
    "vaultgemma": ("9f77c8441d90ae1e",),
}
