"""From public text to token ids, and from a language model back to text."""

from jaxpfl.text.baselines import UnigramBaseline as UnigramBaseline
from jaxpfl.text.baselines import unigram_baseline as unigram_baseline
from jaxpfl.text.generate import generate as generate
from jaxpfl.text.generate import sample_tokens as sample_tokens
from jaxpfl.text.vocabulary import Vocabulary as Vocabulary
