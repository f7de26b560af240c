"""Tokenisers by where they come from, and rows of token ids.

>>> tokeniser = utf8_bytes()
>>> pad(tokeniser.encode(["ab", "c"]), 3)
array([[97, 98, -1],
       [99, -1, -1]], dtype=int32)
"""

from jaxpfl.text.fast_tokeniser import FastTokeniser as FastTokeniser
from jaxpfl.text.fast_tokeniser import gpt2 as gpt2
from jaxpfl.text.fast_tokeniser import hugging_face as hugging_face
from jaxpfl.text.scored_tokeniser import ScoredTokeniser as ScoredTokeniser
from jaxpfl.text.scored_tokeniser import llama2c as llama2c
from jaxpfl.text.tokeniser import PAD as PAD
from jaxpfl.text.tokeniser import Tokeniser as Tokeniser
from jaxpfl.text.tokeniser import UTF8Bytes as UTF8Bytes
from jaxpfl.text.tokeniser import Words as Words
from jaxpfl.text.tokeniser import as_text as as_text
from jaxpfl.text.tokeniser import check_fits as check_fits
from jaxpfl.text.tokeniser import from_vocabulary as from_vocabulary
from jaxpfl.text.tokeniser import one_per_row as one_per_row
from jaxpfl.text.tokeniser import packed as packed
from jaxpfl.text.tokeniser import pad as pad
from jaxpfl.text.tokeniser import utf8_bytes as utf8_bytes
