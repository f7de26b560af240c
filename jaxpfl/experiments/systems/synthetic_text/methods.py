"""The methods that write a synthetic corpus, each a function that returns the corpus's `Author`.

No client's data is read here. A step receives the clients' scores as a release, or reads the ones
that an earlier attempt has stored, so a corpus can be continued without the clients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from jaxpfl.algorithms.base import Algorithm
from jaxpfl.algorithms.candidate_scores import Scorer
from jaxpfl.algorithms.one_look import MomentRewards
from jaxpfl.algorithms.popri import Written, popri, prompts_of, respond, synthesise, with_adapters
from jaxpfl.algorithms.private_evolution import Evolved, Vary, private_evolution, selected_texts
from jaxpfl.algorithms.steering import steer
from jaxpfl.algorithms.stored_rounds import Arrays, PublicDraws
from jaxpfl.errors import InputError
from jaxpfl.experiments.central.text_pool import require_larger
from jaxpfl.experiments.engine.phases import Phases, missing
from jaxpfl.experiments.records.artifacts import Artifact
from jaxpfl.experiments.systems.synthetic_text.config import EMBEDDING, PopriConfig
from jaxpfl.experiments.systems.synthetic_text.models import StudyModels, loaded_fill_model
from jaxpfl.experiments.systems.synthetic_text.questions import Look, SteeringRelease, thinned
from jaxpfl.federated.hosts.processes import decide
from jaxpfl.models.decoder import lora
from jaxpfl.text.generation.decoding import Decoding
from jaxpfl.text.generation.language_model import LanguageModel
from jaxpfl.text.generation.variation import Continue, Rephrase, redraw

Texts = Mapping[str, list[str]]

# How often the generator is asked for a number of texts, since some may be empty.
_ATTEMPTS = 16
# At most so many texts of the untuned generator are compared with those of the steered one.
_FIRST_TEXTS = 500


@dataclass(frozen=True)
class Tuning:
    """The models of a study, and where the rounds of its method are stored and observed.

    Attributes:
      directory: of the run; holds the checkpoints of `pe_sft`'s training.
      distance: the Frechet distance of texts to those of clients that are declared public; called
        only where `popri.checkpoint` is "nearest" and its choice is not stored.
      on_round: is called after each round with its number, its texts by the entry of the record
        that their distance becomes, the best of them in their order, and further entries.
    """

    models: StudyModels
    phases: Phases
    directory: Path
    distance: Callable[[list[str]], float] = missing
    on_round: Callable[[int, Texts, list[str], dict[str, Any]], None] = lambda *_: None


@dataclass(frozen=True)
class Author:
    """A generator, the public texts that its prompts are made of, and how it writes.

    Attributes:
      first: texts of the untuned generator, where the method has rounds.
      choices: what was chosen by a distance, and from what, for the record.
      choose: makes the corpus of what is written and of public texts; None: it is all written.
    """

    models: StudyModels
    generator: Any
    samples: list[str]
    settings: PopriConfig
    first: Sequence[str] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    choose: Callable[[list[str]], Artifact] | None = None

    def texts(self, number: int, later: int = 0, part: int = 0) -> list[str]:
        """Up to `number` texts, none of them empty; another `part` or `later` seed gives others."""
        how: Any = {"seed": self.models.config.run.seed + later, "progress": self.models.progress}
        return synthesise(self.generator, self.samples, number, self.settings, part=part, **how)[0]


def untuned(tuning: Tuning, question: None = None) -> Author:
    """The generator as it is: no client is asked."""
    models = tuning.models
    settings = models.config.popri
    return Author(models, models.generator, models.samples(settings.samples), settings)


def evolved(tuning: Tuning, votes: Scorer) -> Author:
    """Private evolution: the untuned generator is prompted with the texts that were voted for."""
    author, models, phases = untuned(tuning), tuning.models, tuning.phases
    settings = models.config.evolution
    vary, tokens = vary_of(models), models.config.corpus.tokens

    def first() -> Arrays:
        arrays = _first_texts(author, settings.population)
        # The longest text that is ever varied: one without room is refused before a charge.
        longest = " ".join(arrays["texts"].tolist())
        vary(models.generator.shortened([longest], tokens), jax.random.key(0))
        return arrays

    def on_round(result: Evolved) -> None:
        tuning.on_round(result.round, {"fid": result.selected}, result.selected, {})

    texts = phases.load_or_compute("first texts", first)["texts"].tolist()
    stored: Any = {"load_or_compute": phases.load_or_compute, "seed": models.config.run.seed}
    scores = votes, models.embedder, settings
    algorithm = private_evolution(texts, vary, *scores, **stored, on_round=on_round)
    selected = selected_texts(_states(algorithm, phases, votes.rounds)[-1])
    return replace(author, samples=selected, first=texts, choices={"variation": settings.varied_by})


def evolved_and_tuned(tuning: Tuning, votes: Scorer) -> Author:
    """PE+SFT: the generator's adapters are trained on the texts that were voted for."""
    author, models, config = evolved(tuning, votes), tuning.models, tuning.models.config
    start, key = models.generator, jax.random.key(config.run.seed)
    adapted = start.replaced(*lora.attach(start.model, start.params, config.popri.lora, key))
    folder, settings = tuning.directory / "generator_tuning", config.evolution.fine_tuning
    params = models.fitted(adapted, author.samples, settings, folder)
    tuned = adapted.replaced(adapted.model, params)
    return replace(author, generator=tuned, samples=models.samples(config.popri.samples))


def tuned_by_one_look(tuning: Tuning, look: Look) -> Author:
    """POPri by one look: all rewards, and all choices, follow from one release of moments."""
    models, phases, choices = tuning.models, tuning.phases, dict[str, Any]()
    config = models.config
    settings, samples = config.popri, None
    names = settings.samples or tuple(config.corpora or {})
    corpora = {name: models.samples([name]) for name in names} if settings.corpus != "all" else {}
    pool, number = {name: thinned(texts) for name, texts in corpora.items()}, config.corpus.texts
    if settings.corpus == "chosen":
        # Here, because the look is charged.
        require_larger(sum(map(len, pool.values())), number, "corpus.texts")
    final, public = config.corpus.chosen, dict[str, Sequence[str]]()
    if final is not None:
        public = {name: thinned(models.samples([name])) for name in config.corpora or {}}
        require_larger(sum(map(len, public.values())), final, "corpus.chosen")
    released = look.released(phases)
    if settings.corpus == "chosen":
        compute = partial(look.chosen, released[EMBEDDING], pool, number)
        stored = phases.stored("chosen_texts", compute)
        choices["chosen_texts"], samples = dict(stored.record), stored.arrays["texts"].tolist()
    elif settings.corpus == "nearest":
        compute = partial(look.nearest, released[EMBEDDING], corpora)
        nearest = phases.load_or_compute("nearest_corpus", compute)
        choices["corpora"] = {name: values.tolist() for name, values in nearest.items()}
        settings = replace(settings, samples=(str(nearest["names"][0]),))
    judged = partial(look.judged, released, least_words=settings.least_words)
    if settings.tune is not None:
        tried = settings.tune.choices(settings)
        compute = partial(_try, tuning, tried, samples, judged)
        distances = phases.load_or_compute("tried_settings", compute)
        names = [name for name, values in vars(settings.tune).items() if values]
        choices["tried"] = {
            "choices": [{name: getattr(choice, name) for name in names} for choice in tried],
            **{name: values.tolist() for name, values in distances.items()},
        }
        settings = tried[int(distances["chosen"])]
    rewards = MomentRewards(released[EMBEDDING], config.training.rounds)
    author = _tuned(tuning, settings, rewards, judged, samples)
    choose = None if final is None else partial(look.chosen, released[EMBEDDING], public, final)
    return replace(author, choices={**choices, **author.choices}, choose=choose)


def steered(tuning: Tuning, release: SteeringRelease) -> Author:
    """EPSVec's form: the generator, whose layers are moved by what clients released once."""
    author, models, phases = untuned(tuning), tuning.models, tuning.phases
    settings, number = models.config.steering, min(models.config.corpus.texts, _FIRST_TEXTS)
    compute = partial(_first_texts, author, number)
    texts = phases.load_or_compute("first texts", compute)["texts"].tolist()
    released = release.released(phases)
    numbers = np.array(settings.numbers(models.generator.model.config.layers)) + 1
    columns = np.linalg.norm(released["vectors"], axis=1), released["noise"], released["bounds"]
    layers = list(zip(*(column.tolist() for column in (numbers, *columns)), strict=True))
    choices = {"steering": {"strength": settings.strength, "layers": layers}}
    generator = steer(models.generator, released["vectors"], settings)
    return replace(author, generator=generator, first=texts, choices=choices)


METHODS: dict[str, Callable[[Tuning, Any], Author]] = {
    "generator": untuned,
    "private_evolution": evolved,
    "pe_sft": evolved_and_tuned,
    # A cohort scores the responses of each round.
    "popri": lambda tuning, scorer: _tuned(tuning, tuning.models.config.popri, scorer),
    "one look": tuned_by_one_look,
    "steered": steered,
}
"""By `Config.algorithm`."""


def _first_texts(author: Author, number: int) -> Arrays:
    return {"texts": np.array(enough(author.texts, number))}


def _tuned(
    tuning: Tuning,
    settings: PopriConfig,
    rewards: Scorer | MomentRewards,
    judged: Callable[[list[list[str]]], Arrays] = missing,
    samples: list[str] | None = None,
) -> Author:
    """POPri's rounds, whose adapters write the corpus, and after which prompts.

    Prompts are made of `samples`, or of the corpora that `settings` name.

    All choices follow from releases and from clients that are declared public: they are free.
    """
    models, phases, rounds = tuning.models, tuning.phases, list[Written]()
    public = models.samples(settings.samples) if samples is None else samples

    def on_round(written: Written) -> None:
        rounds.append(written)
        texts = list(chain(*written.responses))
        order = np.argsort(-written.scores_KxJ.reshape(-1), kind="stable")
        more = {"candidates": written.candidates, "pairs": written.pairs, **written.means}
        parts = {"fid": texts, **written.compared(settings)}
        tuning.on_round(written.round, parts, [texts[i] for i in order], more)

    stored: Any = {"load_or_compute": phases.load_or_compute, "seed": models.config.run.seed}
    scores = rewards, models.embedder, settings
    shown: Any = {"on_round": on_round, "progress": models.progress}
    algorithm = popri(models.generator, public, *scores, **stored, **shown)
    params_of, states = cast(Any, algorithm.params), _states(algorithm, phases, rewards.rounds)
    writers = [with_adapters(models.generator, settings, params_of(state)) for state in states]

    def measured() -> Arrays:
        # The last adapters have written nothing yet.
        last = _responses(models, writers[-1], public, settings, len(rounds) + 1)
        written = [list(chain(*texts)) for texts in (*(r.responses for r in rounds), last)]
        if settings.checkpoint == "judged":
            return judged(written)
        distances = np.array([tuning.distance(texts) for texts in written])
        return {"distances": distances, "chosen": np.array(distances.argmin())}

    chosen, checkpoint = rewards.rounds, {"round": rewards.rounds}
    if settings.checkpoint != "last":
        by = phases.load_or_compute("distances", measured)
        chosen = int(by["chosen"])
        distances = by["distances"].tolist()
        checkpoint = {"chosen": settings.checkpoint, "round": chosen, "distances": distances}
    best = settings.final_prompts == "best_responses"
    prompting = best_responses(rounds[-1]) if best else public
    first, choices = list(chain(*rounds[0].responses)), {"checkpoint": checkpoint}
    return Author(models, writers[chosen], prompting, settings, first, choices)


def _try(
    tuning: Tuning,
    settings: Sequence[PopriConfig],
    samples: list[str] | None,
    judged: Callable[[list[list[str]]], Arrays],
) -> Arrays:
    """The distances of what the untuned generator writes with each of these settings."""
    models = tuning.models
    # The last adapters are judged by what the round after the last writes.
    round = models.config.training.rounds + 2

    def written(choice: PopriConfig) -> Arrays:
        texts = models.samples(choice.samples) if samples is None else samples
        return {"texts": np.array(_responses(models, models.generator, texts, choice, round))}

    stored = [
        tuning.phases.load_or_compute(f"tried_{index}", partial(written, choice))["texts"]
        for index, choice in enumerate(settings)
    ]
    return judged([texts.reshape(-1).tolist() for texts in stored])


def _responses(
    models: StudyModels,
    writer: LanguageModel,
    samples: list[str],
    settings: PopriConfig,
    round: int,
) -> list[list[str]]:
    """What a generator answers to the prompts of a round in which no client is asked."""
    seed = models.config.run.seed
    prompts = prompts_of(writer, samples, settings.prompts, settings, seed, round)
    key = PublicDraws("popri", seed).key("responses", round)
    return respond(writer, prompts, settings, key, models.progress)[0]


def _states(algorithm: Algorithm, phases: Phases, rounds: int) -> list[Any]:
    """The algorithm's states: before the first round, and after each."""
    leaves, structure = jax.tree.flatten(algorithm.init(jax.random.key(0)))
    # On another processor, the last bit of an adapter could differ.
    states = [jax.tree.unflatten(structure, decide("the first state", lambda: leaves))]
    for round in range(1, rounds + 1):
        states.append(phases.step(algorithm.step, states[-1], round)[0])
    return states


def vary_of(models: StudyModels) -> Vary:
    """The function that varies texts; the new ones have the same format and length."""
    config, generator = models.config, models.generator
    evolution, tokens, popri = config.evolution, config.corpus.tokens, config.popri
    clean, stop = popri.format.response, (popri.format.stop,) if popri.format.stop else ()
    match evolution.varied_by:
        case "continue":
            return Continue(generator, tokens, Decoding(stop=stop), clean)
        case "rephrase":
            return Rephrase(generator, tokens, Decoding(stop=stop), clean)
        case "redraw":
            fill: Vary = redraw(generator, tokens)
        case _:
            fill = loaded_fill_model(evolution.fill_model, tokens=tokens)

    def vary(texts: Sequence[str], key: jax.Array) -> list[str]:
        filled = [clean(text) for text in fill(texts, key)]
        # A masked language model has another tokeniser than the generator.
        cut = generator.pieces(filled, tokens)
        return [new or old for new, old in zip(cut, texts, strict=True)]

    return vary


def enough(
    written: Callable[[int, int], list[str]], number: int, texts: Sequence[str] = ()
) -> list[str]:
    """The first of these `texts` and of those `written(how many, attempt)`: `number` in all."""
    all_texts = list(texts[:number])
    for attempt in range(1, 1 + _ATTEMPTS):
        if lacking := number - len(all_texts):
            all_texts += written(lacking * 5 // 4 + 8, attempt)[:lacking]
    if len(all_texts) < number:
        advice = "it needs more pretraining, or must be another model (section generator)"
        few = f"{len(all_texts)} texts that are not empty, expected {number}"
        raise InputError(f"the generator wrote {few}: {advice}")
    return all_texts


def best_responses(written: Written) -> list[str]:
    """The response to each prompt of a round that clients scored highest, unless it is empty."""
    best = np.argmax(written.scores_KxJ, axis=1).tolist()
    texts = [row[index] for row, index in zip(written.responses, best, strict=True)]
    return [text for text in texts if text]
