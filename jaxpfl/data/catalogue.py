"""The data sets that the shipped configs read: what each holds, where it comes from, where it goes.

`jaxpfl data` and the table of docs/data_sets.md say what is written here.
"""

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxpfl.errors import InputError

EMBEDDED = ""
"""The `variable` of what comes with the installation."""


@dataclass(frozen=True)
class Download:
    """A file at a public address.

    Attributes:
      url: an address that ends in ".lzma" gives a file that is unpacked.
      size: bytes, None where they are not known.
      sha256: of these bytes, in hexadecimal; None where it is not known.
      unpacked: bytes of the unpacked file, where they are known.
    """

    url: str
    size: int | None = None
    sha256: str | None = None
    unpacked: int | None = None


@dataclass(frozen=True)
class OnHub:
    """A data set of the Hugging Face hub, which `jaxpfl convert` groups by client.

    Attributes:
      repository: OWNER/NAME.
      sources: by the folder to write; each with {revision} in place of the commit.
    """

    repository: str
    sources: Mapping[str, str]


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
      variable: the environment variable that names the folder of its files; `EMBEDDED` for none.
      files: paths in that folder, or what a source begins with that needs no file.
      clients: who they are and how many.
      origin: where it comes from.
      licence: as its authors state it.
      form: what the files hold, for those who make them.
      downloads: by file, where it is at a public address in a form that is read here.
      hub: where it is on the Hugging Face hub.
      converted: folders that `jaxpfl convert` makes of it, as the heads of configs say.
    """

    name: str
    variable: str
    files: tuple[str, ...]
    clients: str
    origin: str
    licence: str
    form: str = ""
    downloads: Mapping[str, Download] = field(default_factory=dict)
    hub: OnHub | None = None
    converted: tuple[str, ...] = ()

    def folder(self, given: Path | None = None) -> Path:
        """The folder of its files: `given`, or the one that the variable names.

        Raises:
          InputError: neither says where.
        """
        named = os.environ.get(self.variable)
        if given is None and not named:
            raise InputError(
                f"{self.name}: the environment variable {self.variable} is not set, which names "
                f"the folder for it: export {self.variable}=FOLDER, or give --folder FOLDER"
            )
        return (given or Path(named or "")).expanduser()

    def holds(self, source: str) -> bool:
        """Whether a source of a config, such as "$JAXPFL_TFF/emnist_all.sqlite?...", is of it."""
        head = source.partition("?")[0]
        if self.variable == EMBEDDED:
            return head.partition(":")[0] in self.files
        return head.removesuffix(".lzma") in {
            f"${self.variable}/{file}" for file in (*self.files, *self.converted)
        }

    def state(self) -> str:
        """Whether it is at hand, in a few words; asks no network."""
        if self.variable == EMBEDDED:
            return "embedded"
        folder = os.environ.get(self.variable)
        here = [file for file in self.files if folder and (Path(folder) / file).exists()]
        if len(here) == len(self.files):
            return "here"
        if here:
            return f"{len(here)} of {len(self.files)} files here"
        if self.hub is not None and _in_cache(self.hub.repository):
            return "in the hub's cache"
        return "absent" if folder else f"absent (no {self.variable})"


def find(name: str) -> DataSet:
    """The data set of this name.

    Raises:
      InputError: there is none; names the nearest.
    """
    if name in DATA_SETS:
        return DATA_SETS[name]
    # The end of a name is what people remember: irc_ubuntu, nova.
    near = difflib.get_close_matches(name, DATA_SETS, 1, 0.5) or [
        each for each in DATA_SETS if name and name in each
    ]
    hint = f"did you mean {near[0]}?" if near else "`jaxpfl data list` has their names"
    raise InputError(f"there is no data set {name!r}; {hint}")


def holding(source: str) -> str:
    """The name of the data set that a source of a config is of; "" for another source."""
    return next((each.name for each in DATA_SETS.values() if each.holds(source)), "")


def _in_cache(repository: str) -> bool:
    """Whether the hub's client holds files of a data set, in its own folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    folder = Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()
    return (folder / f"datasets--{repository.replace('/', '--')}" / "snapshots").is_dir()


_TEXT = "gzipped JSON lines, one example a line, with the fields client and text"
_ARRAYS = "an .npz file with the arrays images (uint8, 60,000 x 28 x 28), labels and writer"
_TFF = "the SQLite file that TensorFlow Federated publishes"
_TFF_ADDRESS = "https://storage.googleapis.com/tff-datasets-public"
_GROUPED = "a folder that `jaxpfl convert` wrote"
_CONGRESS = "github.com/unitedstates/congressional-record at 84a5af4"
_NLTK = "github.com/nltk/nltk_data at 5db857e"
_NOVA = "github.com/openstack/nova at 00a0304"
_ROWS = "JSON lines with the field text"


def _tff(name: str, file: str, clients: str, licence: str, **download: object) -> DataSet:
    url = f"{_TFF_ADDRESS}/{file}.lzma"
    return DataSet(
        name,
        "JAXPFL_TFF",
        (file,),
        clients,
        "TensorFlow Federated",
        licence,
        _TFF,
        {file: Download(url, **download)},  # pyright: ignore[reportArgumentType]
    )


def _grouped(name: str, clients: str, licence: str, repository: str, query: str) -> DataSet:
    source = f"huggingface:{repository}?revision={{revision}}&{query}&split=sentences"
    origin = f"{repository} of the Hugging Face hub"
    hub = OnHub(repository, {name: source})
    return DataSet(name, "JAXPFL_GROUPED", (name,), clients, origin, licence, _GROUPED, hub=hub)


def _largefedbench(corpus: str, clients: str, repository: str) -> DataSet:
    parts = {corpus: "train", f"{corpus}_test": "test"}
    sources = {
        folder: f"largefedbench:{corpus}?revision={{revision}}&part={part}"
        for folder, part in parts.items()
    }
    return DataSet(
        f"largefedbench_{corpus}",
        "JAXPFL_LARGEFEDBENCH",
        tuple(parts),
        clients,
        f"{repository} of the Hugging Face hub (Hou et al. 2025)",
        "see its page on the hub",
        _GROUPED,
        hub=OnHub(repository, sources),
    )


def _private(
    name: str, file: str, clients: str, origin: str, licence: str, form: str = _TEXT
) -> DataSet:
    return DataSet(name, "JAXPFL_DATA", (f"{name}/{file}",), clients, origin, licence, form)


_ALL = (
    DataSet(
        "docstrings",
        EMBEDDED,
        ("docstrings",),
        "some 13,000 classes and functions of 21 Python packages",
        "comes with jaxpfl",
        "those of the packages",
    ),
    DataSet(
        "digits",
        EMBEDDED,
        ("digits",),
        "1,797 images, dealt to as many clients as asked for",
        "comes with scikit-learn",
        "CC BY 4.0",
    ),
    _private(
        "text_irc_ubuntu",
        "ubuntu_irc.jsonl.gz",
        "17,513 nicks, 216,239 messages",
        "messages of the #ubuntu channel, 2004 to 2018: `data/{train,dev,test}/*.raw.txt` of "
        "github.com/jkkummerfeld/irc-disentanglement at 82ed04f (Kummerfeld et al. 2019)",
        "CC BY 4.0",
    ),
    _private(
        "text_congress_record",
        "congress_speeches.jsonl.gz",
        "208 members, 789 speeches",
        "floor speeches of two days in the US Congressional Record (the parsed days in the tests "
        f"of {_CONGRESS})",
        "public domain",
    ),
    _private(
        "text_commits_nova",
        "nova_commits.jsonl.gz",
        "1,793 authors, 33,588 messages",
        f"commit messages of {_NOVA}, without trailers",
        "Apache-2.0",
    ),
    _private(
        "public_techdocs_nova",
        "nova_docs.jsonl.gz",
        "none: 1,382 documents",
        f"documentation and release notes of {_NOVA}",
        "Apache-2.0",
        "gzipped JSON lines, one document a line, with the fields doc and text",
    ),
    _private(
        "text_presidents",
        "presidents.jsonl.gz",
        "38 surnames, 2,038 paragraphs",
        "inaugural and State of the Union addresses: `inaugural.zip` and `state_union.zip` of "
        f"{_NLTK}",
        "public domain",
    ),
    _private(
        "text_shakespeare_roles",
        "plays8_roles.jsonl.gz",
        "297 roles, 6,936 speeches",
        f"eight plays by speaking role: `shakespeare.zip` of {_NLTK}",
        "public domain",
    ),
    _private(
        "public_novels",
        "novels.tar.xz",
        "none: 93 novels",
        "English novels of 1839 to 1927: github.com/computationalstylistics/100_english_novels at "
        "143e601",
        "public domain",
        "an archive of .txt files, one a novel",
    ),
    _private(
        "public_wikisplit",
        "wiki_sentences.jsonl.gz",
        "none: 15,000 sentences",
        "sentences of Wikipedia: github.com/google-research-datasets/wiki-split at 80f5bdd (Botha "
        "et al. 2018)",
        "CC BY-SA 4.0",
    ),
    _private(
        "public_pubmedqa",
        "pubmed_abstracts.jsonl.gz",
        "1,000 abstracts",
        "`data/ori_pqal.json` of github.com/pubmedqa/pubmedqa at 1cbae8e (Jin et al. 2019)",
        "MIT; the abstracts are their publishers'",
    ),
    _private(
        "handwriting_mnist_writers",
        "mnist_by_writer.npz",
        "539 writers, 60,000 images",
        "MNIST's training images with the writers that QMNIST found: "
        "github.com/facebookresearch/qmnist at 9406136 (LeCun et al. 1998; Yadav and Bottou 2019)",
        "treat as CC BY-SA 3.0",
        _ARRAYS,
    ),
    _tff(
        "emnist",
        "emnist_all.sqlite",
        "3,400 writers, 749,068 images",
        "public domain (NIST)",
        size=170_507_172,
        sha256="c3aaf91b4cf4e69d53d81627ad119eccdc878ff906f68e66063ff10f67faad48",
        unpacked=4_708_990_976,
    ),
    _tff(
        "shakespeare",
        "shakespeare.sqlite",
        "715 roles, 18,424 lines",
        "public domain",
        size=1_329_828,
        sha256="d3d11fceb9e105439ac6f4d52af6efafed5a2a1e1eb24c5bd2dd54ced242f5c4",
    ),
    _tff(
        "cifar100",
        "cifar100.sqlite",
        "500 training and 100 test clients, dealt; 60,000 images",
        "none stated",
        size=153_019_920,
        sha256="23d3916c9caa33395737ee560cc7cb77bbd05fc7b73647ee7be3a7e764172939",
    ),
    DataSet(
        "stackoverflow",
        "JAXPFL_TFF",
        (
            "stackoverflow.word_count.tar.bz2",
            "stackoverflow.tag_count.tar.bz2",
            "stackoverflow.sqlite",
        ),
        "342,477 training users, 135,818,730 sentences; also held-out and test users",
        "TensorFlow Federated",
        "CC BY-SA 3.0",
        f"{_TFF}, and its counts of words and tags",
        {
            "stackoverflow.word_count.tar.bz2": Download(
                f"{_TFF_ADDRESS}/stackoverflow.word_count.tar.bz2",
                sha256="1dc00256d6e527c54b9756d968118378ae14e6692c0b3b6cad470cdd3f0c519c",
            ),
            "stackoverflow.tag_count.tar.bz2": Download(
                f"{_TFF_ADDRESS}/stackoverflow.tag_count.tar.bz2",
                sha256="6fe281cec490d9384a290d560072438e7e2b377bbb823876ce7bd6f82696772d",
            ),
            "stackoverflow.sqlite": Download(f"{_TFF_ADDRESS}/stackoverflow.sqlite.lzma"),
        },
        converted=tuple(f"stackoverflow_{part}" for part in ("train", "test", "heldout")),
    ),
    _largefedbench("congress", "133,000 speeches", "hazylavender/CongressionalDataset"),
    _largefedbench("biorxiv", "72,000 abstracts", "hazylavender/biorxiv-abstract"),
    _grouped(
        "fedc4", "15.6 million domains", "ODC-BY", "allenai/c4", "config=en&client=url|domain"
    ),
    _grouped(
        "fedwiki",
        "6.4 million articles",
        "CC BY-SA 3.0",
        "wikimedia/wikipedia",
        "config=20231101.en&client=title|value",
    ),
    _grouped(
        "fedccnews",
        "8,800 domains, 708,241 articles",
        "the publishers'",
        "vblagoje/cc_news",
        "client=url|domain",
    ),
    DataSet(
        "fedbookco",
        "JAXPFL_GROUPED",
        ("fedbookco",),
        "17,868 books",
        "BookCorpusOpen, which its page on the Hugging Face hub no longer gives; from a folder "
        "SHARDS of yours, with the columns title and text: `jaxpfl convert "
        "'SHARDS?client=title|value&split=sentences'` and the path",
        "the authors'",
        _GROUPED,
    ),
    DataSet(
        "c4_subset",
        "JAXPFL_LARGEFEDBENCH",
        ("c4.jsonl",),
        "none: texts of the web",
        "a part of your choice of allenai/c4 on the Hugging Face hub",
        "ODC-BY",
        _ROWS,
    ),
    DataSet(
        "wikitext",
        "JAXPFL_TFF",
        ("wikitext.txt",),
        "none: paragraphs of Wikipedia",
        "the training text of wikitext-103 (Merity et al. 2017)",
        "CC BY-SA 3.0",
        "plain text, one paragraph a line",
    ),
    DataSet(
        "reddit",
        "JAXPFL_REDDIT",
        ("train.jsonl", "test.jsonl"),
        "some 3,000 users",
        "LEAF's Reddit: github.com/TalwalkarLab/leaf (Caldas et al. 2018)",
        "the authors'",
        "JSON lines, a comment a line, with the fields client (the user) and text",
    ),
    DataSet(
        "pubmed",
        "JAXPFL_PUBMED",
        ("train.jsonl", "test.jsonl", "omega.jsonl"),
        "75,316 abstracts",
        "abstracts of PubMed of 1 to 7 August 2023 (Yu et al. 2023), and in omega.jsonl 2,000 "
        "sample abstracts of a language model",
        "the publishers'",
        _ROWS,
    ),
)

DATA_SETS: dict[str, DataSet] = {each.name: each for each in _ALL}
"""Every data set that a shipped config reads, and one that none does, by name."""

VARIABLES = {each.variable for each in _ALL if each.variable}
"""The environment variables that name folders of data sets."""
