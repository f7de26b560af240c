"""From public text to token ids, and from a language model back to text."""

from jaxpfl.text.baselines import UnigramBaseline as UnigramBaseline
from jaxpfl.text.baselines import unigram_baseline as unigram_baseline
from jaxpfl.text.characters import char_lm as char_lm
from jaxpfl.text.characters import oov_words as oov_words
from jaxpfl.text.generate import generate as generate
from jaxpfl.text.oov import OOVRates as OOVRates
from jaxpfl.text.oov import oov_rates as oov_rates
from jaxpfl.text.oov import oov_rates_of as oov_rates_of
from jaxpfl.text.sampling import Sampling as Sampling
from jaxpfl.text.sampling import sample as sample
from jaxpfl.text.sentences import generate_sentences as generate_sentences
from jaxpfl.text.sentences import sample_tokens as sample_tokens
from jaxpfl.text.top_words import TopWords as TopWords
from jaxpfl.text.top_words import top_words as top_words
from jaxpfl.text.vocabulary import Vocabulary as Vocabulary
from jaxpfl.text.vocabulary import with_words as with_words
