"""FreD's noise beside Algorithm 1's, at the budget of the paper's Figure 2.

    python -m benchmarks.micro.fred_noise

For each released number its noise's standard deviation, three ways:

    jaxpfl             one Gaussian, exact calibration, both releases composed exactly
    calibration        one Gaussian of the same sensitivity by the formula of the paper,
                       c sqrt(2 ln(1.25 / delta)) / epsilon, half of the budget to each release
    as printed         what Algorithm 1 adds up to: the mean's noise at each example and then
                       averaged, the covariance's at each client and on the plain triangle

`less` is calibration / jaxpfl. As printed, the noise is another mechanism's: its epsilon is the
REALISED one, under replace-one, beside the epsilon it claims. Nothing here is random or timed.

The paper claims (epsilon, delta) for each of two releases. But it adds the mean's noise to each of
n examples and then averages, so that this noise is too small by a factor of sqrt(n). It adds the
covariance's noise to each client's contribution, so that this noise is too large by a factor of
sqrt(clients). It discloses n, so that the guarantee can only hold under replace-one: one example
then moves the sum by 2 c and the second moment, whose plain triangle has the noise, by sqrt(2) c^2.
"""

import dataclasses
import math

import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    epsilon: float = 0.6
    delta: float = 2e-6
    examples: int = 150_000
    clients: int = 3_000
    clip_norm: float = 1.0


def main(config: Config) -> list[dict]:
    from jaxpfl.algorithms.fred import FredPlan
    from jaxpfl.privacy.confirmation import gaussian_epsilon

    n, c = config.examples, config.clip_norm
    half = {"epsilon": config.epsilon / 2, "delta": config.delta / 2}
    plan = FredPlan.calibrated(
        epsilon=config.epsilon, delta=config.delta, unit="example", clip_norm=c
    )
    as_printed = FredPlan.as_printed(**dataclasses.asdict(config))
    classical = math.sqrt(2 * math.log(1.25 / half["delta"])) / half["epsilon"]
    rows = []
    for what, index, ours in (
        ("mean, a coordinate", 1, 1.0),
        ("covariance, diagonal", 2, 1.0),
        ("covariance, off the diagonal", 2, 1 / math.sqrt(2)),
    ):
        own = plan.noise_stds[index] * ours / n
        paper = classical * plan.sensitivities[index] / n
        realised = gaussian_epsilon(1 / as_printed.multipliers[index], half["delta"])
        rows.append(
            {
                "what": what,
                "jaxpfl": own,
                "calibration": paper,
                "less": paper / own,
                "as printed": as_printed.noise_stds[index] / n,
                "claimed epsilon": half["epsilon"],
                "realised epsilon": realised,
                **dataclasses.asdict(config),
            }
        )
    columns = ["what", "jaxpfl", "calibration", "less", "as printed", "claimed epsilon"]
    harness.table(rows, [*columns, "realised epsilon"])
    both = gaussian_epsilon(math.sqrt(2) / classical, config.delta)
    print(f"{plan.statement()}; multipliers {plan.multipliers[1]:.3f}, classical {classical:.3f}")
    print(f"two classical releases really cost epsilon = {both:.3f} at delta = {config.delta:g}")
    print(f"recorded in {harness.record('fred_noise', rows)}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config))
