"""A plan from flat keywords, so that a test can change one of them."""

from typing import Any

from jaxpfl.privacy import AdaptiveClip, Clip, Noise, Plan, accounting, events, participation

# Keywords of a good plan, and of one whose noise is calibrated.
FIELDS = dict(
    population=1000, clients_per_round=100, rounds=10, clip_norm=0.5, noise_multiplier=2.0,
    delta=1e-5,
)  # fmt: skip
EVERYONE = "everyone"
TARGET = {name: value for name, value in FIELDS.items() if name != "noise_multiplier"}


# The fields of a participation beside those that all have.
OWN: dict[str, dict[str, Any]] = {
    "min_separation": {"separation": 3},
    "cyclic_poisson": {"separation": 3},
    "truncated_poisson": {"at_most": 500},
}


def of(
    sampling: Any, population: Any, clients_per_round: Any, **own: Any
) -> participation.Participation:
    taken = population if clients_per_round == EVERYONE else clients_per_round
    return participation.of(sampling, population, taken, **own)


def flat_plan(
    *,
    population: Any,
    clients_per_round: Any = EVERYONE,
    clip_norm: Any = 1.0,
    noise_multiplier: Any = 1.0,
    sampling: Any = "poisson",
    adaptive_clip: AdaptiveClip | None = None,
    noise: Any = "independent",
    separation: Any = None,
    at_most: Any = None,
    **others: Any,
) -> Plan:
    """The plan with these parts; `others` are fields of `Plan` itself."""
    return Plan(
        clip=Clip(clip_norm, adaptive_clip),
        noise=Noise(noise_multiplier, noise),
        participation=of(
            sampling, population, clients_per_round, separation=separation, at_most=at_most
        ),
        **others,
    )


def flat_calibrated(
    *,
    population: Any,
    clients_per_round: Any,
    clip_norm: Any,
    sampling: Any = "poisson",
    adaptive_clip: AdaptiveClip | None = None,
    **others: Any,
) -> Plan:
    """`Plan.calibrated` with these parts; `others` are its other arguments."""
    return Plan.calibrated(
        clip=Clip(clip_norm, adaptive_clip),
        participation=of(sampling, population, clients_per_round),
        **others,
    )


def flat_without_privacy(
    *,
    population: Any,
    clients_per_round: Any = EVERYONE,
    clip_norm: Any = 1e6,
    sampling: Any = "poisson",
    **others: Any,
) -> Plan:
    """`Plan.without_privacy` with these parts; `others` are its other arguments."""
    return Plan.without_privacy(
        clip=Clip(clip_norm), participation=of(sampling, population, clients_per_round), **others
    )


def epsilon_of(event: Any, delta: float, accountant: Any, adjacency: Any) -> float:
    """The epsilon of an event."""
    return accounting.epsilon_of_counts(events.counts(event), delta, accountant, adjacency)
