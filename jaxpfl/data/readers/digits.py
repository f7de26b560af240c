"""scikit-learn's bundled handwritten digits, dealt to clients.

1,797 images of 8 x 8 in 10 classes. They carry no writer, so clients are made: each draws a label
distribution from Dirichlet(alpha) and the images of each label are dealt in proportion (Hsu, Qi,
Brown 2019, "Measuring the effects of non-identical data distribution"). A small alpha gives
clients of few labels.
"""

import numpy as np
import pyarrow as pa

from jaxpfl import checks
from jaxpfl.data.population import Population
from jaxpfl.privacy.sampling import generator


def read(clients: int = 100, alpha: float = 0.5, seed: int = 0) -> Population:
    """Deals the digits to `clients` clients; some may get none.

    Columns: "image" float32 [8, 8, 1] in 0..1, "label" int32.
    """
    from sklearn.datasets import load_digits

    checks.positive_int("digits clients", clients)
    checks.positive("digits alpha", alpha)
    checks.non_negative_int("digits seed", seed)
    bunch = load_digits()
    labels = bunch.target.astype(np.int32)
    random = generator(seed, "digits")
    share_CxL = random.dirichlet(np.full(10, float(alpha)), clients)
    owner = np.empty(len(labels), np.int64)
    for label in range(10):
        rows = np.flatnonzero(labels == label)
        share = share_CxL[:, label] / share_CxL[:, label].sum()
        owner[rows] = random.choice(clients, len(rows), p=share)
    order = np.argsort(owner, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=clients))])
    images = (bunch.images / 16.0).astype(np.float32)[..., None]
    return Population(
        {"image": images[order], "label": labels[order]},
        offsets,
        pa.array([f"digits client {i}" for i in range(clients)], pa.large_string()),
        f"digits?clients={clients}&alpha={alpha:g}&seed={seed}",
        "simulated writer",
    )
