"""The models of a study: variations by a masked one, shared devices, and what is refused."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from jaxpfl.errors import InputError
from jaxpfl.experiments import carry_out
from jaxpfl.experiments.central.training import Fitted
from jaxpfl.experiments.systems.synthetic_text.methods import vary_of
from jaxpfl.experiments.systems.synthetic_text.models import StudyModels
from jaxpfl.privacy.ledger import Ledger
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel, Writer
from jaxpfl.text.generation.variation import Continue, MaskAndFill
from tests.refusals import refusal
from tests.text.masked_models import TINY_BERT, masked_model_folder
from tests.text.tokenisers.utf8_bytes import UTF8Bytes

TEXTS = ["the quick brown fox jumps over it", "a lazy dog sleeps"]


class Generator(Writer):
    """Only its tokeniser is asked for: a text is cut to letters."""

    tokeniser = UTF8Bytes()


def variation(config):
    """By a generator that is never asked to write."""
    models = StudyModels(config)
    models.__dict__["generator"] = Generator()
    return vary_of(models)


def mask_and_fill(folder) -> tuple[str, ...]:
    return "--evolution.variation", "fill", "--evolution.fill_model", str(folder)


def test_texts_are_varied_as_the_config_says(synthetic_config, tmp_path, monkeypatch):
    folder = masked_model_folder(tmp_path / "bert")
    plain = variation(synthetic_config("private_evolution"))
    assert isinstance(plain, Continue)
    assert (plain.kept, plain.tokens, plain.decoding.stop) == (0.5, 8, ("\n",))
    vary = variation(synthetic_config("private_evolution", *mask_and_fill(folder)))
    found = vary(TEXTS, jax.random.key(0))
    assert found == vary(TEXTS, jax.random.key(0)) != vary(TEXTS, jax.random.key(1))
    # At most corpus.tokens of the generator's tokens, here letters, whatever the model's were.
    assert all(0 < len(text) <= 8 for text in found)
    given = []

    def filled(self, texts, key):
        given.append((self.tokens, list(texts)))
        return ["one line\nand another", " "]

    monkeypatch.setattr(MaskAndFill, "__call__", filled)
    # One line in the format of lines; what would be empty stays as it was.
    assert vary(TEXTS, jax.random.key(0)) == ["one line", TEXTS[1]]
    assert given == [(8, TEXTS)]


@pytest.mark.parametrize("rule", ["words:3", "tokens:8", "messages"])
def test_clients_corpora_and_written_texts_are_cut_alike(synthetic_config, tmp_path, rule):
    """Prompts are made of pieces, and every text of the corpus is one."""
    changes = ("--corpus.cut", rule, "--popri.format.stop", "", "--popri.new_tokens", "30")
    config = synthetic_config("generator", *changes, "--popri.response_tokens", "30")
    outcome = carry_out.run(config, tmp_path / "run", progress=False)
    lines = (outcome.out / "corpus.jsonl").read_text().splitlines()
    models = StudyModels(config)
    samples, documents = models.samples(["near"]), models.public.documents(["near"])
    assert samples == [piece for own in models.cut.pieces(documents) for piece in own]
    words = [len(json.loads(line)["text"].split()) for line in lines]
    assert outcome.record["cautions"] == []
    if rule == "words:3":
        assert max(words) == 3 == max(len(sample.split()) for sample in samples)
    else:
        whole = [text for document in documents for text in document]
        assert max(words) > 3 and (samples == whole) == (rule == "messages")


def test_what_a_generator_cannot_do_is_refused_with_what_it_can(synthetic_config):
    for form, variation, words in (
        ("pre_text", "null", "'fill', which needs evolution.fill_model choose 'redraw'"),
        ("aug_pe", "null", "'rephrase' follows instructions choose 'continue'"),
        ("aug_pe", "fill", "'fill', which needs evolution.fill_model"),
    ):
        options = "--evolution.form", form, "--evolution.variation", variation
        refusal(lambda options=options: synthetic_config("pe_sft", *options), words)
        synthetic_config("popri", *options)


def test_a_generator_that_devices_share_writes_what_one_device_does(synthetic_config):
    plain, split = (
        StudyModels(synthetic_config("popri", "--training.model_devices", number)).generator
        for number in "12"
    )
    kernel = split.params["layers"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size / 2
    of_each = [
        each.write(["a fox", "a"], jax.random.key(0), decoding=Decoding(8))
        for each in (plain, split)
    ]
    assert of_each[0].texts == of_each[1].texts
    with pytest.raises(InputError, match="model = 3 devices must share.* has 2 devices"):
        StudyModels(synthetic_config("popri", "--training.model_devices", "3"))


def test_a_model_that_cannot_fill_is_refused_before_anything_is_made(synthetic_config, tmp_path):
    """No client has been asked, and no directory made: the models themselves refuse."""
    for name, message in (
        (TINY_BERT, "found an encoder without that head"),
        (tmp_path / "nowhere", "was not found"),
    ):
        config = synthetic_config("pe_sft", *mask_and_fill(name))
        with pytest.raises(InputError, match=message):
            StudyModels(config)
    # Other methods make no variations, so theirs is not read.
    StudyModels(dataclasses.replace(config, method="popri"))


def test_a_generator_is_tuned_on_the_ids_of_its_own_tokeniser(synthetic_config, monkeypatch):
    """The downstream model may have another, as in the paper."""
    models, given = StudyModels(synthetic_config("pe_sft")), []
    start = models.generator
    other = LanguageModel(start.model, start.params, UTF8Bytes())

    def fit(model, params, columns, *more, **options):
        given.append(columns["tokens"])
        return Fitted(params, {})

    monkeypatch.setattr("jaxpfl.experiments.systems.synthetic_text.models.fit", fit)
    models.fitted(other, ["abc"], models.config.evolution.fine_tuning, Path("unused"))
    assert given[0][0, :3].tolist() == [97, 98, 99]


def test_texts_without_room_for_their_variation_are_refused_before_a_charge(
    synthetic_config, tmp_path
):
    config = synthetic_config("private_evolution", "--corpus.tokens", "32")
    refusal(lambda: carry_out.run(config, tmp_path / "run", progress=False), "must have")
    ledger = tmp_path / "run" / "ledger.jsonl"
    assert not ledger.exists() or not Ledger.read(ledger).charges
