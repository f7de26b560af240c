"""What makes the corpus of a study: how texts are varied."""

from jaxpfl.experiments.systems.synthetic_text.corpus_writer import CorpusWriter
from jaxpfl.text.generation.variation import Continue


def test_texts_are_varied_as_the_config_says(synthetic_config):
    writer = CorpusWriter(synthetic_config("private_evolution"))
    writer.__dict__["generator"] = None
    assert isinstance(writer.vary, Continue)
    assert (writer.vary.kept, writer.vary.tokens) == (0.5, 8)
    assert writer.vary.decoding.stop == ("\n",)
