"""A vocabulary from wherever a config or a command names one.

    FOLDER                     what `jaxpfl convert --vocabulary` wrote: the words of its tokens
    PATH.json                  what `Vocabulary.save` wrote, such as vocabulary.json of a run
    NAME.word_count(.tar.bz2)  TensorFlow Federated's counts for Stack Overflow, or other counts of
                               words in such a file (see `data.readers.plain_text`)
    another source             of PUBLIC text, see `data.open`: its words are counted

Words with counts are those between spaces (see `splitting`). A count of TensorFlow Federated is the
number of training users who wrote the word. The field takes this list as public, although it was
made from the very clients who train, without differential privacy: no privacy statement of this
library covers it.
"""

from pathlib import Path

from jaxpfl import files
from jaxpfl.data.catalogue import expanded
from jaxpfl.data.open import why_missing as why_missing_source
from jaxpfl.data.population import Population
from jaxpfl.data.readers.plain_text import read_counts
from jaxpfl.data.storage import VOCABULARY
from jaxpfl.errors import InputError
from jaxpfl.text.tokenisers.vocabulary import SPECIALS, Vocabulary

_ENDINGS = (".word_count", ".word_count.tar.bz2")


def public_words(source: str | Population, size: int | None) -> Vocabulary:
    """The vocabulary of `size` ids that `source` names, or of the texts of PUBLIC clients.

    Args:
      size: ids, with the four special ones. None takes a stored vocabulary as it is.

    Raises:
      InputError: there is no such source, it has another number of words, or `size` is None and
        the source is no stored vocabulary.
      CorruptFile: the file is damaged.
    """
    if isinstance(source, Population):
        assert size is not None
        return of_size(Vocabulary.from_public(source, size), size, source.name)
    path = Path(expanded(source.partition("?")[0]))
    if (path / VOCABULARY).is_file():
        path = path / VOCABULARY
    if path.suffix == ".json":
        if not path.is_file():
            raise InputError(f"vocabulary {source!r}: {files.missing(path)}")
        return of_size(Vocabulary.load(path), size, source)
    if size is None:
        advice = f"10004 for the 10000 most frequent words and the {len(SPECIALS)} special ones"
        raise InputError(f"vocabulary {source!r} has no size: say how many ids, as {advice}")
    if path.name.endswith(_ENDINGS):
        ranked = [pair for pair in read_counts(path).items() if pair[0] not in SPECIALS]
        vocabulary = Vocabulary.from_ranked(ranked, size, 0, source=path.name, splitting="spaces")
    else:
        vocabulary = Vocabulary.from_public(source, size)
    return of_size(vocabulary, size, source)


def is_list(source: str) -> bool:
    """Whether a source names words or their counts, and so no texts of which words are counted."""
    head = expanded(source.partition("?")[0])
    return head.endswith((".json", *_ENDINGS)) or (Path(head) / VOCABULARY).is_file()


def why_missing(source: str) -> str:
    """As `data.open.why_missing`: "" if the source is available; reads nothing of it."""
    try:
        if not is_list(source):
            return why_missing_source(source)
        path = Path(expanded(source.partition("?")[0]))
        return "" if path.exists() else files.missing(path)
    except InputError as unset:
        return str(unset)


def of_size(vocabulary: Vocabulary, size: int | None, source: str) -> Vocabulary:
    """Refuses another number of ids: a model of `size` ids would have some without a word."""
    if size is not None and len(vocabulary) != size:
        ids = f"{len(vocabulary)} ids, expected vocab_size = {size}"
        raise InputError(f"vocabulary {source!r} has {ids}: give more text, or a smaller size")
    return vocabulary
