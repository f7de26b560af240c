"""A stand-in of the hub: the network is never asked."""

from types import SimpleNamespace

import pytest


def stand_in(monkeypatch, rows) -> SimpleNamespace:
    """Notes in `asked` what was asked for, and gives `rows`, or raises them."""
    datasets = pytest.importorskip("datasets")
    hub = SimpleNamespace(rows=rows, asked=[])

    def load_dataset(name, /, **options):
        hub.asked.append((name, options))
        if isinstance(hub.rows, Exception):
            raise hub.rows
        found = datasets.Dataset.from_dict(hub.rows)
        return found.to_iterable_dataset() if options["streaming"] else found

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return hub
