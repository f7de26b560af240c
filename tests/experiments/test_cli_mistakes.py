"""Mistakes on the command line: each is refused in one sentence that says what to do."""

import json
from pathlib import Path

import pytest

from jaxpfl.cli import COMMANDS, main, parser

CONFIG = """\
data: {source: clients.jsonl, public: public.jsonl}
model: {name: cifg_lm, vocab_size: 7, embedding: 4, hidden: 4, projection: 4, sequence_length: 6}
privacy: {epsilon: 8.0, delta: 1e-3, accountant: rdp}
training: {rounds: 2, clients_per_round: 8, batch_size: 4, max_examples: 4}
evaluation: {every: 1, declared_public: true, max_examples: 10}
"""
PLAN = "calibrate --delta 3e-6 --rounds 20 --population 10000 --clients-per-round 1000"

# What was typed, and what the message must say: where, what was found, what was expected.
MISTAKES = [
    # commands and arguments
    ("rnu run.yaml", "rnu run"),
    ("trian", "'trian' expected run resume sweep"),
    ("--verbose", "command --help"),
    ("run", "CONFIG run --help"),
    ("resume", "RUN resume --help"),
    ("budget ledger.jsonl", "--delta budget --help"),
    ("export folder", "FOLDER"),
    ("convert clients.jsonl", "OUT"),
    ("data", "ACTION data --help"),
    ("data gett emnist", "'gett' list get"),
    ("data get", "NAME jaxpfl data list"),
    ("data get emnits", "'emnits' emnist"),
    ("data get digits", "digits nothing to fetch"),
    ("data get emnist", "JAXPFL_TFF not set --folder"),
    ("data get emnist --folder folder --revision x", "--revision hub emnist"),
    ("data list emnist", "'emnist'"),
    ("resume folder --training.rounds 7", "--training.rounds resume --help"),
    ("run run.yaml training.rounds=5", "'training.rounds=5' --section.key VALUE"),
    ("run run.yaml --help-me", "--help-me valid --training.rounds"),
    # files
    ("run absent.yaml", "absent.yaml no such file jaxpfl configs"),
    ("run folder", "folder neither a file jaxpfl configs"),
    ("run empty.yaml", "empty.yaml mapping found nothing"),
    ("run list.yaml", "list.yaml mapping found list"),
    ("run syntax.yaml", "syntax.yaml line 2"),
    ("run binary.yaml", "binary.yaml UTF-8"),
    ("run grid.yaml", "grid.yaml jaxpfl sweep"),
    ("sweep run.yaml", "run.yaml jaxpfl run"),
    ("sweep absent.yaml", "absent.yaml no such file jaxpfl configs"),
    ("sweep grid.yaml --ray 2 --dry-run", "--ray --dry-run"),
    ("sweep grid.yaml --ray 0", "--ray at least 1"),
    ("run run.yaml --hosts 2", "--launcher --hosts both"),
    ("resume absent", "absent no such directory"),
    ("resume folder", "folder no config.yaml"),
    ("report folder", "folder no run.json"),
    ("export folder out", "folder config.yaml"),
    ("export folder out --texts 0", "texts at least 1 found 0"),
    ("export folder folder", "folder exists already another FOLDER"),
    ("audit run.yaml --confidence 1", "--confidence strictly between found 1"),
    ("audit run.yaml --runs -1", "--runs at least 1 found -1"),
    ("audit", "CONFIG --texts"),
    ("audit run.yaml --texts clients.jsonl", "CONFIG --texts"),
    ("audit --texts clients.jsonl --training.rounds=5", "unexpected --training.rounds"),
    ("budget absent.jsonl --delta 1e-5", "absent.jsonl no such ledger"),
    ("budget clients.jsonl --delta 1e-5", "clients.jsonl line 1"),
    ("run run.yaml --out run.yaml", "run.yaml file directory"),
    ("run run.yaml --ledger folder", "folder directory ledger"),
    ("run run.yaml --ledger clients.jsonl", "clients.jsonl line 1"),
    ("convert clients.jsonl folder", "folder exists new"),
    # keys and values of a config
    ("run run.yaml --training.round 5", "--training.round '--training.rounds'"),
    ("run run.yaml --training.rounds", "--training.rounds value"),
    ("run run.yaml --training.rounds five", "training.rounds whole number 'five'"),
    ("run run.yaml --training.rounds 0", "--training.rounds at least 1 found 0"),
    ("run run.yaml --training.rounds 2.5", "training.rounds whole number 2.5"),
    ("run run.yaml --training.clients_per_round 1000", "--training.clients_per_round = 1000"),
    ("run run.yaml --training.server.name adamm", "training.server.name 'adam' 'adamm'"),
    ("run run.yaml --training.server.learning_rate -1", "learning_rate positive -1"),
    ("run run.yaml --model.name lstm", "model.name 'cifg_lm' 'lstm'"),
    ("run run.yaml --model.hidden_size 4", "--model.hidden_size '--model.hidden'"),
    ("run run.yaml --data.split.train 2", "data.split 1 found 2"),
    ("run run.yaml --run.devices 100000", "run.devices at most cores found 100000"),
    ("run run.yaml --run.seed x", "run.seed whole number 'x'"),
    ("run run.yaml --privacy.delta 1", "privacy.delta strictly between found 1"),
    ("run run.yaml --privacy.delta 0.5", "--privacy.delta = 0.5 smaller"),
    ("run run.yaml --privacy.clip_norm 0", "clip_norm positive found 0"),
    # data
    ("run run.yaml --data.source number.jsonl", "number.jsonl row 1 'text' string"),
    ("run run.yaml --data.source clients.jsonl?splitt=words", "'splitt' 'split'"),
    ("run run.yaml --data.split.train 1e-9", "data.split.train no client of 40"),
    ("run run.yaml --dryrun", "--dryrun '--dry-run'"),
    # plans
    (f"{PLAN} --epsilon -7", "--epsilon positive found -7"),
    (f"{PLAN} --epsilon 7 --noise-multiplier 1", "--noise-multiplier --epsilon"),
    (f"{PLAN} --epsilon 7 --clients-per-round 20000", "--clients-per-round = 20000 10000"),
    (f"{PLAN} --epsilon seven", "--epsilon 'seven'"),
    (f"{PLAN} --noise-multiplier 0", "--noise-multiplier positive"),
    ("fred --private clients.jsonl --candidates public.jsonl", "--epsilon --delta"),
    (
        "fred --private clients.jsonl --candidates clients.jsonl --epsilon 1 --delta 1e-3 "
        "--embedder hashed:8",
        "clients.jsonl private public name another source",
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("mistakes")
    rows = [json.dumps({"client": f"c{number}", "text": "one two three"}) for number in range(40)]
    contents = {
        "run.yaml": CONFIG,
        "empty.yaml": "",
        "list.yaml": "- a\n",
        "syntax.yaml": "data: {source: [\n",
        "grid.yaml": "base: run.yaml\nmetric: accuracy\ngrid: {training.round: [1]}\n",
        "clients.jsonl": "\n".join(rows) + "\n",
        "public.jsonl": json.dumps({"client": "doc", "text": "three two one"}) + "\n",
        "number.jsonl": '{"client": "secretive", "text": 5}\n',
    }
    for name, content in contents.items():
        (made / name).write_text(content)
    (made / "binary.yaml").write_bytes(b"\x00\xff\xfe")
    (made / "folder").mkdir()
    return made


@pytest.mark.parametrize(("typed", "said"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_is_refused_in_one_sentence(folder, capsys, monkeypatch, typed, said):
    monkeypatch.chdir(folder)
    monkeypatch.delenv("JAXPFL_TFF", raising=False)
    before = sorted(folder.rglob("*"))
    assert main(typed.split()) == 2
    printed = capsys.readouterr()
    message = printed.err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    for word in said.split():
        assert word in message
    assert "secretive" not in printed.err and not printed.out
    # Nothing is left behind: neither an empty directory nor a ledger.
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_is_one_of_it(name):
    """The parser takes it, and everything that it does not know is a setting of a config."""
    typed = COMMANDS[name].example.split()
    assert typed[0] == name
    _, rest = parser().parse_known_args(typed)
    assert not rest or COMMANDS[name].takes_overrides
