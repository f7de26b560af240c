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
    """The clients of each round, which are noted as they are drawn."""
    drawn, real = [], PreparedQuery.drawn

    def note(self, work):
        found = real(self, work)
        drawn.append(found.tolist())
        return found

    monkeypatch.setattr(PreparedQuery, "drawn", note)
    return drawn
