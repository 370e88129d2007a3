"""The digests of model classes' sources that our decoder was compared with.

Written by scripts/decoder_digests.py.
"""

VERSIONS = ("5.17.0", "5.23.0")
"""The versions of transformers that they were taken from."""

DIGESTS: dict[str, tuple[str, ...]] = {
    "arcee": ("9572cb9ac7dfaf7f", "97043b618ec2b255"),
    "cohere": ("67bcd394b1ad95ca", "d61e197d18d02024"),
    "cohere2": ("871ad8d397f0df8d", "c6e5e3a5a94caf4a"),
    "cwm": ("18949cd5625e8ad9", "9d8087cb9867ca2d"),
    "ernie4_5": ("0652b5e5dec4b858", "10cad4c69c336fc7"),
    "exaone4": ("5a9379245c786e91", "6f24fc9084e5a5e2"),
    "gemma": ("13295e87ffa3517f", "32c1f0a2285bc354"),
    "gemma2": ("91828756151b0aff", "c8e9f6de9fc1bd9f"),
    "gemma3_text": ("09593231c8e92400", "5859e7d7762d5f0c"),
    "glm": ("96d964af1e87e18e", "b54c4cccfb1e07e6"),
    "glm4": ("0f247493830c558e", "c58d3343006a07f9"),
    "granite": ("c3320c84da5486e5", "fdfd2013743415a5"),
    "helium": ("d3796aab81c7f649", "e56fdbcbdb3da628"),
    "hunyuan_v1_dense": ("0618c9be9abb3541", "43adbcb983f8896f"),
    "hyperclovax": ("0743ecfe2c8ae7ef", "6cd1624479667d76"),
    "jais2": ("3cedaef9ac0fc376", "44062b729b9bbaf6"),
    "llama": ("55d17129a2bbd7b5", "a4c950517d49ccf3"),
    "ministral": ("9edc43d07734b239", "bd1735517d1d5f15"),
    "mistral": ("4ed23e30e38e8730", "e3ad361da68cd623"),
    "mixtral": ("046ed1eb6207a450", "9e8746d672433f69"),
    "olmo2": ("01dc77cd0727a7e4", "1f855f58a2c5234b"),
    "olmo3": ("4564bab9f6b05840", "ff89de6cd3967a9b"),
    "olmoe": ("5ccfc3fc7f1dc379", "f5ec233e0268eb12"),
    "phi3": ("6e475b39392ea912", "aed476f1d63fc4b2"),
    "qwen2": ("58c002740f625991", "ca9692b65186b20d"),
    "qwen3": ("4e4e17057aeb31c9", "f0189112ac2a06ea"),
    "qwen3_moe": ("884e385e990b4557", "b2e9e16ab6ba1af1"),
    "seed_oss": ("616e57b69025e832", "f47bb9c3f083265e"),
    "smollm3": ("634e98a81622d765", "86bc8e85af8b0d09"),
    "starcoder2": ("aa62994a13d6a4a0", "e7172d5431dc3e85"),
    "vaultgemma": ("1fff77fc04c4bd5a", "9f77c8441d90ae1e"),
}
