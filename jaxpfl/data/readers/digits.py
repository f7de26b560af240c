"""The images that come with scikit-learn: 1,797 handwritten digits of 8 x 8 pixels."""

import numpy as np

from jaxpfl import checks
from jaxpfl.data.population import Population, from_rows
from jaxpfl.errors import InputError


def read_digits(clients: int = 100, alpha: float = 0.5, seed: int = 0) -> Population:
    """Digits dealt to clients with uneven classes, as in Hsu, Qi and Brown (2019), section 3.

    Each client draws its class proportions from a symmetric Dirichlet(alpha) and then its examples,
    one by one without replacement. When a class is used up, the others keep their proportions.
    Numbers of examples differ by at most one between clients.

    Columns: "image" float32 [8, 8, 1] in 0 .. 1 (0 = paper), "label" int32 in 0 .. 9.
    """
    clients = checks.positive_int("digits: clients", clients)
    alpha = checks.positive("digits: alpha", alpha)
    seed = checks.non_negative_int("digits: seed", seed)
    # Imported late: scikit-learn takes a second.
    from sklearn.datasets import load_digits

    pixels, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
    total = len(labels)
    if clients > total:
        raise InputError(f"digits: clients must be at most {total}, found {clients}")
    generator = np.random.Generator(np.random.Philox(key=seed))
    classes = int(labels.max()) + 1
    left = [
        generator.permutation(np.flatnonzero(labels == label)).tolist() for label in range(classes)
    ]
    proportions = generator.dirichlet(np.full(classes, alpha), clients)
    client_of_row = np.zeros(total, np.int64)
    # Clients take turns, one example each, so that the last one does not only get leftovers.
    for turn in range(total):
        client = turn % clients
        available = np.array([bool(rows) for rows in left])
        # With a small alpha, proportions may underflow to 0: then all classes left are as likely.
        weights = np.where(available, proportions[client], 0.0)
        weights = weights if weights.sum() > 0 else available.astype(float)
        label = generator.choice(classes, p=weights / weights.sum())
        client_of_row[left[label].pop()] = client
    return from_rows(
        client_of_row,
        [f"client {index}" for index in range(clients)],
        {
            "image": (pixels / 16.0).astype(np.float32).reshape(-1, 8, 8, 1),
            "label": labels.astype(np.int32),
        },
        name=f"digits?clients={clients}&alpha={alpha:g}&seed={seed}",
        unit="dealt share of the digits",
    )
