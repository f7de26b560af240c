"""The text of the config that `jaxpfl init` writes."""

import json
import math
from collections.abc import Sequence

# Of 100 clients, 80 train: fewer hide nobody in a useful model.
_FEW = 200
_PUBLIC = """\
  # PUBLIC text that the model's words are taken from, at no cost in privacy. These are docstrings
  # of Python packages: a public text that is more like yours, of any source or file, is better.
  public: "docstrings:numpy,sklearn"
"""
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
  # Labels are 0 .. classes - 1. Counted in the file: where it is private which occur, give the
  # number that you know.
  classes: {}
  hidden: 32             # 0: logistic regression
"""


def config_text(
    source: str, clients: int, rows: int, said: Sequence[str], sizes: tuple[int, int] | None
) -> str:
    """A config of a private word language model, or of a private classifier.

    Args:
      said: what was guessed, a line each.
      sizes: the numbers of features and classes; None for a language model.
    """
    if sizes is None:
        what, public, model = "word language model", _PUBLIC, _LANGUAGE_MODEL
        rounds, epochs, rate = 30, 1, 2.0
    else:
        what, public, model = "classifier of rows of numbers", "", _CLASSIFIER.format(*sizes)
        rounds, epochs, rate = 60, 2, 0.5
    # Below 1 / N by a factor of two to twenty.
    delta = 10.0 ** -math.ceil(math.log10(2 * max(clients, 5)))
    cohort = max(2, min(400, round(0.8 * clients / 4)))
    # Above the mean, so that most clients keep all; a power of two.
    most = min(64, 2 ** math.ceil(math.log2(2 * rows / clients + 1)))
    few = ""
    if clients < _FEW:
        few = (
            f"# CAUTION: {clients} clients are few. The noise that hides one of them hides most of "
            "what they\n# have in common: expect little at this epsilon.\n"
        )
    guesses = "\n".join(f"#   {line}" for line in said)
    # JSON's strings are YAML's, too.
    quoted = json.dumps(source, ensure_ascii=False)
    return f"""\
# A private {what}, written by `jaxpfl init` from the columns of a table:
{guesses}
#
# Command:   jaxpfl run THIS_FILE          (any setting: --section.key VALUE)
#            jaxpfl run THIS_FILE --dry-run    what it would do and cost; reads no client
{few}
data:
  # All rows of a client are protected together. Another column: ?client=COLUMN; client=* makes each
  # row a client.
  source: {quoted}
  clients: {clients}
{public}\
  # Of the CLIENTS: those of train are protected. Those of valid and test are NOT: see evaluation.
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
