"""`jaxpfl init FILE`: a config for a table of one's own.

Names of columns and the numbers of clients, features and classes go into it; no other value does.
"""

import json
import math
from urllib.parse import quote

import yaml

from jaxpfl.data.open import open as open_population
from jaxpfl.errors import InputError
from jaxpfl.experiments.registry import from_mapping

_FEWEST = 20
_TEMPLATE = """\
# Written by `jaxpfl init`. Any setting can be changed here, or by --section.key VALUE.
#   jaxpfl run THIS_FILE --dry-run    what it would do and cost; reads no client
#   jaxpfl run THIS_FILE

data:
  source: {source}
  clients: {clients}     # all rows of one client are protected together{public}
  # Clients of train are protected. Those of valid and test are NOT: see evaluation.
  split: {{train: 0.8, valid: 0.1, test: 0.1}}

{model}
privacy:
  epsilon: 8.0           # of everything that the run releases; smaller is more private
  delta: {delta:.1e}         # well below 1 / the number of training clients
  clip_norm: 0.5         # what one client can change, at most; noise is in proportion to it

training:
  rounds: {rounds}
  clients_per_round: {cohort}
  batch_size: 16
  max_examples: {most}       # of a client; those of larger clients are drawn at random
  epochs: {epochs}
  client: {{name: sgd, learning_rate: {rate}}}
  server: {{name: nesterov, learning_rate: 1.0, momentum: 0.9}}

evaluation:
  # STATES that the clients of valid and test (a fifth of yours) may be looked at: scores on them
  # are shown without noise. If they are as private as the others, set declared_public: false and
  # every: 0; then no score is shown.
  declared_public: true
  every: 10
  max_examples: 2000

run:
  checkpoint_every: 20
"""
_PUBLIC = """
  # PUBLIC text that the model's words are taken from, at no cost in privacy: better one that is
  # more like yours, of any source or file.
  public: "docstrings:numpy,sklearn\""""
_LANGUAGE_MODEL = """\
model:
  name: cifg_lm
  vocab_size: 4000       # fewer words need less noise
  sequence_length: 20    # words of an example; the rest is cut off
  embedding: 64
  hidden: 128
  projection: 64
  unigram_prior: true    # starts from the word frequencies of the public text
"""
_CLASSIFIER = """\
model:
  name: classifier_mlp   # features x become arcsinh(x): the scale of private ones is not known
  features: {}
  # Counted in the file: where it is private which occur, give the number that you know.
  classes: {}
  hidden: 32             # 0: logistic regression
"""


def init(file: str, **columns: str | None) -> str:
    """A config, as YAML with comments, for a table, all of which is read.

    Args:
      file: the table, as `data.open` takes it, without options.
      columns: what `data.open` takes as "client", "text", "label" and "features": of a word
        language model a text, of a classifier a label and features. None: the default.

    Raises:
      InputError: the file cannot be read, does not fit, or has fewer than 20 clients.
    """
    if "?" in file or "%" in file:
        raise InputError(f"{file}: a table whose name has ? or % must be renamed first")
    given = {name: column for name, column in columns.items() if column is not None}
    if ("label" in given) != ("features" in given) or {"text", "label"} <= given.keys():
        raise InputError("expected a text, or a label and features that it is predicted from")
    query = "&".join(f"{name}={quote(column, safe=', *|')}" for name, column in given.items())
    source = f"{file}?{query}" if query else file
    population = open_population(source)
    clients, examples = len(population), population.num_examples
    if clients < _FEWEST:
        raise InputError(
            f"{source}: has fewer than {_FEWEST} clients, which cannot be divided into those that "
            "train and those that test"
        )
    classes = 0
    model, rounds, epochs, rate = _LANGUAGE_MODEL, 30, 1, 2.0
    if "label" in given:
        classes = max(2, int(population.columns["label"].max()) + 1)
        features = population.columns["features"].shape[1]
        model, rounds, epochs, rate = _CLASSIFIER.format(features, classes), 60, 2, 0.5
    config = _TEMPLATE.format(
        # JSON's strings are YAML's, too.
        source=json.dumps(source, ensure_ascii=False),
        clients=clients,
        public="" if classes else _PUBLIC,
        model=model,
        # Below 1 / N by a factor of two to twenty.
        delta=10.0 ** -math.ceil(math.log10(2 * clients)),
        rounds=rounds,
        cohort=max(2, min(400, round(0.8 * clients / 4))),
        # Above the mean, so that most clients keep all; a power of two.
        most=min(64, 2 ** math.ceil(math.log2(2 * examples / clients + 1))),
        epochs=epochs,
        rate=rate,
    )
    # Nothing is written that `jaxpfl run` would refuse.
    from_mapping(yaml.safe_load(config), "the config for the table")
    return config
