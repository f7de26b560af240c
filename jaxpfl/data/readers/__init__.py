"""One file per kind of source."""

from jaxpfl.data.readers.digits import read_digits as read_digits
from jaxpfl.data.readers.docstrings import read_docstrings as read_docstrings
from jaxpfl.data.readers.frames import from_dataframe as from_dataframe
from jaxpfl.data.readers.plain_text import read_plain_text as read_plain_text
from jaxpfl.data.readers.tff_sqlite import read_tff as read_tff
