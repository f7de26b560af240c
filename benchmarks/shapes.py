"""The shapes of published decoders, which are measured with random weights."""

from jaxpfl.models.decoder.config import DecoderConfig


def distilgpt2() -> DecoderConfig:
    """DistilGPT2's shape (Sanh et al. 2019): 81.9 M parameters."""
    return DecoderConfig("gpt2", vocab_size=50_257, hidden_size=768, layers=6, heads=12)


def smollm2() -> DecoderConfig:
    """SmolLM2-135M's shape (Ben Allal et al. 2025): 134.5 M parameters."""
    return DecoderConfig(
        "llama", 49_152, 576, 30, 9, 3, inner_size=1_536, positions=8_192, tied=True,
        rope_theta=100_000.0,
    )  # fmt: skip


def llama3_8b() -> DecoderConfig:
    """Llama 3 8B's shape (Grattafiori et al. 2024): 8.03 billion parameters."""
    return DecoderConfig(
        "llama", 128_256, 4_096, 32, 32, 8, inner_size=14_336, positions=8_192, rope_theta=500_000.0
    )
