"""How small a difference between corpora FreD sees: Figure 2 of the FreD paper on real text.

    python -m benchmarks.macro.fred_resolution
    python -m benchmarks.macro.fred_resolution --embedder minilm --figure docs/fred_resolution.png

The examples of #ubuntu IRC (JAXPFL_DATA) are dealt to two parts; one is private (two thirds of
them, about as many as the paper's 150,000), the other is public and mixed: Y% of it and (100 - Y)%
of a far corpus, scored in closed form. The distance at Y = 0 .. 100 is shown without privacy and
over several trials at (epsilon, delta), with the unit of the paper, the example. Then it is asked
whether the ranges over the trials at Y = 99 and Y = 100 part, and if not, how large the private
part would have to be: the noise of a release does not depend on the size, so with noise divided by
k the moments are those that k times as many clients of the same kind would release.

`--deal client` deals nicks and not messages: then the public part is other people's text, and
differs from the private part by more than chance.
"""

import dataclasses
from typing import Literal

import tyro

from benchmarks import harness
from benchmarks.macro.fred_order import release, sample


@dataclasses.dataclass(frozen=True)
class Config:
    private: str = "$JAXPFL_DATA/text_irc_ubuntu/ubuntu_irc.jsonl.gz"
    far: str = "$JAXPFL_DATA/public_wikisplit/wiki_sentences.jsonl.gz"
    embedder: str = "hashed"
    epsilon: float = 0.6
    delta: float = 2e-6
    trials: int = 5
    deal: Literal["message", "client"] = "message"
    sizes: tuple[int, ...] = (1, 3, 10, 30, 100, 300, 1000)  # times the private part at hand
    figure: str | None = None


POINTS = (0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 98, 99, 100)


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(None)
    import numpy as np

    from jaxpfl.algorithms.frechet import Reference, mixture
    from jaxpfl.algorithms.fred import FredPlan, public_moments
    from jaxpfl.algorithms.gaussian_moments import moments
    from jaxpfl.data import open as open_population
    from jaxpfl.text.embed import embed, embedder

    function = embedder(config.embedder)
    private, near = dealt(embed(open_population(config.private), function), config.deal)
    far = public_moments(sample(open_population(config.far), 20_000), function)
    parts = [moments(near.columns["embedding"], 1.0), far]
    shares_PxK = np.array([[y / 100, 1 - y / 100] for y in POINTS])

    def curve(plan) -> np.ndarray:
        mixed = [mixture(parts, shares_K) for shares_K in shares_PxK]
        return Reference(release(private, plan).moments).distances(mixed)

    exact_P = curve(FredPlan.without_privacy(unit="example"))
    plan = FredPlan.calibrated(epsilon=config.epsilon, delta=config.delta, unit="example")
    shared = {
        "embedder": function.name,
        "far": config.far.rpartition("/")[2],
        "deal": config.deal,
        "private examples": private.num_examples,
        "epsilon": config.epsilon,
        "delta": config.delta,
        "trials": config.trials,
    }
    rows, curves = [], {}
    for times in config.sizes:
        count, mean, covariance = plan.multipliers
        larger = dataclasses.replace(
            plan, multipliers=(count / times, mean / times, covariance / times)
        )
        curves[times] = np.stack([curve(larger) for _ in range(config.trials)])
        at99_T, at100_T = curves[times][:, -2], curves[times][:, -1]
        rows.append(
            {
                "what": f"{times} x the private part",
                **shared,
                "times": times,
                "99: min": at99_T.min(),
                "99: max": at99_T.max(),
                "100: min": at100_T.min(),
                "100: max": at100_T.max(),
                "ranges part": bool(at100_T.max() < at99_T.min()),
                "100 nearest": int(sum(at100_T < at99_T)),
                "monotone": int(sum(np.all(np.diff(each) < 0) for each in curves[times])),
            }
        )
    rows.append(
        {
            "what": "without privacy",
            **shared,
            "99: min": exact_P[-2],
            "100: min": exact_P[-1],
            "100 nearest": bool(exact_P[-1] < exact_P[-2]),
            "monotone": bool(np.all(np.diff(exact_P) < 0)),
            "curve": dict(zip(map(str, POINTS), exact_P.tolist(), strict=True)),
        }
    )
    columns = ["what", "99: min", "99: max", "100: min", "100: max", "ranges part"]
    harness.table(rows, [*columns, "100 nearest", "monotone"])
    print(f"recorded in {harness.record('fred_resolution', rows)}")
    if config.figure:
        draw(exact_P, curves, rows, config, config.figure)
    return rows


def dealt(population, deal: str):
    """Two disjoint parts: by client, or by message with all of them as one client."""
    import numpy as np

    from jaxpfl.data.population import Population

    if deal == "client":
        parts = population.split({"private": 2 / 3, "public": 1 / 3}, seed=0)
        return parts["private"], parts["public"]
    rows = np.random.default_rng(1).permutation(population.num_examples)
    return [
        Population(
            {"embedding": population.columns["embedding"][part]}, np.array([0, len(part)]), ["all"]
        )
        for part in np.split(rows, [2 * len(rows) // 3])
    ]


def draw(exact_P, curves, rows, config: Config, path: str) -> None:
    """Figure 2: the whole curve, and its end at the size at hand and where the ranges part."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.4), dpi=144, layout="constrained")
    parted = next((row["times"] for row in rows if row.get("ranges part")), None)
    panels = [("0 to 100 %", 1, 0), ("95 to 100 %", 1, -4)]
    if parted is not None and parted != 1:
        panels.append((f"95 to 100 %, SIMULATED: noise / {parted}", parted, -4))
    for axes, (title, times, first) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        shown = POINTS[first:]
        curve_TxP = curves[times][:, first:]
        middle_P = curve_TxP.mean(axis=0)
        spread = np.abs(np.stack([curve_TxP.min(axis=0), curve_TxP.max(axis=0)]) - middle_P)
        label = f"({config.epsilon:g}, {config.delta:g}), range of {config.trials} trials"
        axes.errorbar(shown, middle_P, yerr=spread, fmt="o-", ms=3.5, capsize=3, label=label)
        if first == 0:
            axes.plot(shown, exact_P, color="#c81e1e", ls="--", lw=1.2, label="NOT PRIVATE")
            axes.legend(frameon=False, fontsize=8.5)
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
        axes.set_xlabel("Y, % of the near corpus")
        axes.set_ylabel("FreD")
        axes.grid(color="#e5e7eb")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    print(f"drawn: {path}")


if __name__ == "__main__":
    main(tyro.cli(Config))
