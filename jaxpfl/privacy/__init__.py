"""What a release costs, and why it is safe."""

from jaxpfl.privacy.accounting import epsilon
from jaxpfl.privacy.clipping import clip_contribution, global_norm
from jaxpfl.privacy.keys import (
    RoundKeys,
    key_from_words,
    key_to_words,
    noise_root,
    round_keys,
    training_root,
)
from jaxpfl.privacy.ledger import Budget, Ledger
from jaxpfl.privacy.mechanisms import gaussian_noise_like
from jaxpfl.privacy.plan import AdaptiveClip, Plan

__all__ = [
    "AdaptiveClip",
    "Budget",
    "Ledger",
    "Plan",
    "RoundKeys",
    "clip_contribution",
    "epsilon",
    "gaussian_noise_like",
    "global_norm",
    "key_from_words",
    "key_to_words",
    "noise_root",
    "round_keys",
    "training_root",
]
