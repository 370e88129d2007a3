"""Digests of the source code of the model classes that our decoder was compared with.

Written by tests/decoder_digests.py.
"""

VERSIONS = ("5.17.0", "5.23.0", "5.24.0")
"""The versions of transformers whose sources were hashed."""

DIGESTS: dict[str, tuple[str, ...]] = {
    "arcee": ("28cfb0d2f44b8167", "9572cb9ac7dfaf7f", "97043b618ec2b255"),
    "cohere": ("4abab6b1642f629b", "67bcd394b1ad95ca", "d61e197d18d02024"),
    "cohere2": ("871ad8d397f0df8d", "c6e5e3a5a94caf4a", "dc5ecd5ef6fbcbb4"),
    "cwm": ("18949cd5625e8ad9", "992f47b69a9833f5", "9d8087cb9867ca2d"),
    "ernie4_5": ("0652b5e5dec4b858", "10cad4c69c336fc7", "d313642094f5c768"),
    "exaone4": ("5a9379245c786e91", "6f24fc9084e5a5e2", "ddf3617987b576d1"),
    "gemma": ("13295e87ffa3517f", "32c1f0a2285bc354", "bdf41fea04ef29ff"),
    "gemma2": ("65fa818b1cf67ff5", "91828756151b0aff", "c8e9f6de9fc1bd9f"),
    "gemma3_text": ("09593231c8e92400", "502e0797b985700f", "5859e7d7762d5f0c"),
    "glm": ("96d964af1e87e18e", "af3abdccac4c996b", "b54c4cccfb1e07e6"),
    "glm4": ("0f247493830c558e", "333b97bf764546f9", "c58d3343006a07f9"),
    "granite": ("b1b4fecdfe39d0ae", "c3320c84da5486e5", "fdfd2013743415a5"),
    "helium": ("67882abe80c825d1", "d3796aab81c7f649", "e56fdbcbdb3da628"),
    "hunyuan_v1_dense": ("0618c9be9abb3541", "43adbcb983f8896f", "a6e89c27793fbdc6"),
    "hyperclovax": ("0743ecfe2c8ae7ef", "3359e1cf2227e4f6", "6cd1624479667d76"),
    "jais2": ("3cedaef9ac0fc376", "44062b729b9bbaf6", "d4e9eb808c232cbb"),
    "llama": ("55d17129a2bbd7b5", "a4c950517d49ccf3", "ca772ca8e1bb93c7"),
    "ministral": ("5d6469c0a788dffb", "9edc43d07734b239", "bd1735517d1d5f15"),
    "mistral": ("4ed23e30e38e8730", "9cbf45ba9327dcf5", "e3ad361da68cd623"),
    "mixtral": ("046ed1eb6207a450", "9e8746d672433f69", "deb22dcbdbb22439"),
    "olmo2": ("01dc77cd0727a7e4", "1f855f58a2c5234b", "6a70cabfd887cb80"),
    "olmo3": ("4564bab9f6b05840", "87001dab8636ded9", "ff89de6cd3967a9b"),
    "olmoe": ("48b70d5ec619691f", "5ccfc3fc7f1dc379", "f5ec233e0268eb12"),
    "phi3": ("0343a7f4e5873e9d", "6e475b39392ea912", "aed476f1d63fc4b2"),
    "qwen2": ("58c002740f625991", "71f81a6edca33aa4", "ca9692b65186b20d"),
    "qwen3": ("4e4e17057aeb31c9", "8fb74857f7275010", "f0189112ac2a06ea"),
    "qwen3_moe": ("2b528a6b9b76f430", "884e385e990b4557", "b2e9e16ab6ba1af1"),
    "seed_oss": ("616e57b69025e832", "b26fbefa4a4682fb", "f47bb9c3f083265e"),
    "smollm3": ("634e98a81622d765", "6b4d57307bce6c70", "86bc8e85af8b0d09"),
    "starcoder2": ("1e06c9581f5cc20a", "aa62994a13d6a4a0", "e7172d5431dc3e85"),
    "vaultgemma": ("1fff77fc04c4bd5a", "9f77c8441d90ae1e", "ed46e21494becfe4"),
}
