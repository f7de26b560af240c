"""What the tests of algorithms share."""

import pytest

from jaxpfl.federated.release.prepared_query import PreparedQuery
from jaxpfl.text.generation.language_model import LanguageModel
from tests.algorithms.popri_parts import trained_generator


@pytest.fixture(scope="session")
def generator() -> LanguageModel:
    return trained_generator()


@pytest.fixture
def cohorts(monkeypatch):
    """The clients of each round; they follow from its number alone, on every machine."""
    drawn = []

    def draw(self, work):
        found = self.query.plan.sample(0, work.round)
        drawn.append(found.tolist())
        return found

    monkeypatch.setattr(PreparedQuery, "drawn", draw)
    return drawn
