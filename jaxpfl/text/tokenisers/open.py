"""Tokenisers by where they come from, and rows of token ids.

>>> tokeniser = utf8_bytes()
>>> pad(tokeniser.encode(["ab", "c"]), 3)
array([[97, 98, -1],
       [99, -1, -1]], dtype=int32)
"""

from jaxpfl.text.tokenisers.base import Tokeniser as Tokeniser
from jaxpfl.text.tokenisers.base import UTF8Bytes as UTF8Bytes
from jaxpfl.text.tokenisers.base import Words as Words
from jaxpfl.text.tokenisers.base import as_text as as_text
from jaxpfl.text.tokenisers.base import check_fits as check_fits
from jaxpfl.text.tokenisers.base import from_vocabulary as from_vocabulary
from jaxpfl.text.tokenisers.base import one_per_row as one_per_row
from jaxpfl.text.tokenisers.base import packed as packed
from jaxpfl.text.tokenisers.base import pad as pad
from jaxpfl.text.tokenisers.base import utf8_bytes as utf8_bytes
from jaxpfl.text.tokenisers.fast import FastTokeniser as FastTokeniser
from jaxpfl.text.tokenisers.fast import gpt2 as gpt2
from jaxpfl.text.tokenisers.fast import hugging_face as hugging_face
from jaxpfl.text.tokenisers.scored import ScoredTokeniser as ScoredTokeniser
from jaxpfl.text.tokenisers.scored import llama2c as llama2c
