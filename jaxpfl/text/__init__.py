"""From public text to token ids, and from a language model back to text."""

from typing import TYPE_CHECKING

from jaxpfl import lazy

if TYPE_CHECKING:
    from jaxpfl.text.character.top_words import TopWords as TopWords
    from jaxpfl.text.character.top_words import top_words as top_words
    from jaxpfl.text.character.words import char_lm as char_lm
    from jaxpfl.text.character.words import oov_words as oov_words
    from jaxpfl.text.generation.decoding import Decoding as Decoding
    from jaxpfl.text.generation.language_model import LanguageModel as LanguageModel
    from jaxpfl.text.generation.sampling import sample as sample
    from jaxpfl.text.generation.sentences import generate_sentences as generate_sentences
    from jaxpfl.text.generation.sentences import sample_tokens as sample_tokens
    from jaxpfl.text.metrics.baselines import UnigramBaseline as UnigramBaseline
    from jaxpfl.text.metrics.baselines import unigram_baseline as unigram_baseline
    from jaxpfl.text.metrics.oov import OOVRates as OOVRates
    from jaxpfl.text.metrics.oov import oov_rates as oov_rates
    from jaxpfl.text.metrics.oov import oov_rates_of as oov_rates_of
    from jaxpfl.text.tokenisers.vocabulary import Vocabulary as Vocabulary
    from jaxpfl.text.tokenisers.vocabulary import with_words as with_words

__getattr__, __dir__, __all__ = lazy.face(__name__)
