"""A folder with a masked language model of random weights, as one is published."""

import shutil
from pathlib import Path

from jaxpfl.models.checkpoints import pretrained
from jaxpfl.models.encoder.config import EncoderConfig
from jaxpfl.models.encoder.network import Encoder
from tests.published_models import SIZES
from tests.trees import drawn

TINY_BERT = Path(__file__).parents[1] / "golden" / "tiny_bert"
"""An encoder without a head, with a tokeniser of 128 ids: [CLS] 2, [SEP] 3, [MASK] 4."""


def masked_model_folder(folder: Path, positions: int = 96, causal: bool = False) -> Path:
    config = EncoderConfig("bert", vocab_size=128, positions=positions, **SIZES)
    model = Encoder(config, head=True, causal=causal)
    pretrained.save(folder, model, drawn(model, 0))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_BERT / name, folder)
    return folder
