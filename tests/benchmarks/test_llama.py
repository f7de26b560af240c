"""The GPU benchmark's script runs from end to end on a small shape; it measures nothing here."""

import pytest

from benchmarks.gpu import llama


@pytest.mark.long
def test_the_script_runs_on_a_tiny_shape(capsys, monkeypatch):
    recorded = []
    monkeypatch.setattr(llama.harness, "record", lambda *arguments: recorded.append(arguments))
    llama.main(
        llama.Config(
            shape="tiny",
            prompts=4,
            responses=2,
            prompt_tokens=24,
            new_tokens=8,
            batch_size=4,
            part=2,
        )
    )
    text = capsys.readouterr().out
    assert "generation" in text and "dpo" in text
    assert [name for name, _ in recorded] == ["llama"]
    assert all(row["shape"] == "tiny" for row in recorded[0][1])


def test_operations_are_those_of_the_published_shape():
    """Twice the parameters that multiply, 8.03 billion less the embedding, for a token alone."""
    import jax

    from jaxpfl.models import count_parameters
    from jaxpfl.models.decoder.config import llama3_8b
    from jaxpfl.models.decoder.network import Decoder

    model = Decoder(llama3_8b())
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    norms = 65 * 4096
    multiply = count_parameters(shapes) - count_parameters(shapes["embed"]) - norms
    assert llama.products_per_token(model, 0) + llama.head_per_token(model) == 2 * multiply
