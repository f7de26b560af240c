"""The configs of foundation-model size, on converted folders of the same columns, made small."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from jaxpfl.data.folders import convert
from jaxpfl.experiments import carry_out, registry
from jaxpfl.experiments.systems.federated_training.study import prepare

CONFIGS = Path(__file__).parents[4] / "configs"
SETS = {
    "fedc4": ("url|domain", ("text", "timestamp", "url")),
    "fedwiki": ("title|value", ("id", "url", "title", "text")),
    "fedccnews": ("url|domain", ("title", "text", "domain", "date", "url")),
    "fedbookco": ("title|value", ("title", "text")),
}
SMALL = ["--model.vocab-size", "12", "--model.hidden", "8", "--model.embedding", "8",
         "--model.projection", "8", "--training.rounds", "2", "--training.clients-per-round", "8",
         "--training.max-examples", "4", "--training.batch-size", "4",
         "--training.clients-per-bucket", "8", "--evaluation.every", "2",
         "--evaluation.max-examples", "8", "--evaluation.sentences", "0", "--run.devices", "1",
         "--privacy.epsilon", "null", "--privacy.noise-multiplier", "1.0",
         "--data.split.train", "0.5", "--data.split.valid", "0.1", "--data.split.test", "0.1",
         "--data.split.public", "0.3"]  # fmt: skip


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Converts shards with a set's columns; its config, made small."""

    def make(name: str):
        client, columns = SETS[name]
        (tmp_path / "shards").mkdir()
        for shard in range(2):
            rows = [
                {
                    column: f"https://site{row % 40}.org/{shard}" if column == "url"
                    else f"One of many pages of site {row}. The next sentence is in {shard}, too."
                    if column == "text"
                    else f"{column} {row % 40}"
                    for column in columns
                }
                for row in range(80)
            ]  # fmt: skip
            parquet.write_table(
                pa.Table.from_pylist(rows), tmp_path / "shards" / f"{shard}.parquet"
            )
        monkeypatch.setenv("JAXPFL_GROUPED", str(tmp_path))
        source = f"{tmp_path}/shards?client={client}&split=sentences"
        convert(source, tmp_path / name, progress=False)
        return registry.load(CONFIGS / f"{name}.yaml", SMALL)

    return make


@pytest.mark.parametrize("name", SETS)
def test_every_set_becomes_an_experiment(configured, name):
    experiment = prepare(configured(name))
    parts = (experiment.train, experiment.valid, experiment.test)
    assert sum(map(len, parts)) < 40
    # Each client has four rows of two sentences.
    assert set(experiment.train.sizes().tolist()) == {8}
    column = SETS[name][0].partition("|")[0]
    assert f'"{column}"' in experiment.clients.unit


@pytest.mark.long
def test_a_word_model_trains_on_one(configured, tmp_path):
    record = carry_out.run(configured("fedc4"), tmp_path / "run", progress=False).record
    assert [row["model"] for row in record["table"]] == ["untrained", "unigram", "this run"]
