"""What two runs' ledgers have in common: each has a key of its own."""

import json
from pathlib import Path

from jaxpfl.privacy import certificate, verify
from jaxpfl.privacy.chain import Chain
from tests.experiments.canaries import public_files

# What follows from the key of a ledger, by its name in JSON.
_KEYED = {"ledger_head", "head", "key", "population", "origin", "seal"}


def made(path: Path) -> list[str]:
    """Charges and recorded releases, sorted: a record may be written before or after a charge."""
    lines = Chain.read(path).lines[1:]
    return sorted(json.dumps(line, sort_keys=True) for line in lines)


def same_but_heads(first: Path, second: Path) -> bool:
    """Whether two files of a run are the same, apart from keyed ledgers and their heads."""
    if first.name == "ledger.jsonl":
        return made(first) == made(second)
    if first.suffix != ".json":
        return first.read_bytes() == second.read_bytes()
    return _headless(first) == _headless(second)


def assert_same_records(out: Path, straight: Path) -> set[str]:
    """Two runs wrote the same public records, whose names are returned.

    Attempts have dates, which pages show, too; of checkpoints, a resumed run keeps others.
    """
    found, expected = (
        {
            path.relative_to(folder).as_posix()
            for path in public_files(folder)
            if path.suffix in (".json", ".jsonl", ".npz", ".yaml")
            and not {"checkpoints", "attempts.jsonl"} & {*path.parts}
        }
        for folder in (out, straight)
    )
    assert found == expected
    for name in expected:
        assert same_but_heads(out / name, straight / name), name
    return expected


def certified(out: Path) -> str:
    """What the verifier says of a finished run's certificate and of the ledgers that it names."""
    path = out / certificate.NAME
    ledgers = [out / ledger["name"] for ledger in json.loads(path.read_text())["ledgers"]]
    return "\n".join(verify.verified([path], ledgers, None, False))


def _headless(path: Path) -> object:
    content = json.loads(path.read_text())
    if path.name == "manifest.json":
        # It is of all that the manifest says, the ledger's head included.
        del content["sha256"]
    return _without(content)


def _without(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without(inner) for name, inner in value.items() if name not in _KEYED}
    return [_without(inner) for inner in value] if isinstance(value, list) else value
