"""From public text to token ids, and from a language model back to text."""

from jaxpfl.text.vocabulary import Vocabulary as Vocabulary
