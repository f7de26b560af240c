"""Compares our reading of TensorFlow Federated's files with its own, example by example.

    .venv/bin/python tools/tff_check.py [PATH.sqlite?dataset=emnist&split=all_train ...]
    .venv/bin/python tools/tff_check.py --golden FOLDER

Without arguments: the files in $JAXPFL_DATA/../fixtures/tff, if they are at hand, and files that
TFF's own saver writes here: several hundred clients of a mixed schema, and the schemas of the data
sets. Compared are client ids and their order, numbers of examples, names, types, shapes and every
bit of the values. With --golden, what TFF reads of the fixtures is kept in FOLDER, for the tests.
Needs .venv-tff (`make tff-check` makes it).
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
import psutil

from jaxpfl.data.population import collect
from jaxpfl.data.readers.tff_examples import SCHEMAS, Feature, Schema
from jaxpfl.data.readers.tff_sqlite import stream_tff

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-tff" / "bin" / "python"

SAMPLE = {
    "label": ["int32", []],
    "pixels": ["float32", [4, 4]],
    "score": ["int64", []],
    "tokens": ["text", []],
}
MIXED = {
    "bytes": ["uint8", [5, 5]],
    "floats": ["float32", [2, 3]],
    "long": ["int64", [4]],
    "short": ["int32", []],
    "tiny": ["int8", []],
    "words": ["text", []],
}


def main() -> int:
    if not PYTHON.exists():
        raise SystemExit("tensorflow-federated is not installed: run `make tff-check`")
    with tempfile.TemporaryDirectory() as folder:
        golden = Path(sys.argv[2]) if sys.argv[1:2] == ["--golden"] else None
        if golden:
            jobs = _fixtures()
        else:
            jobs = [_given(source) for source in sys.argv[1:]] or _fixtures() + _made(Path(folder))
        for number, job in enumerate(jobs):
            job["out"] = str(Path(folder) / f"{number}.npz")
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps(jobs), encoding="utf-8")
        _run_tff(path)
        failed = [job for job in jobs if not _same(job)]
        for job in jobs if golden else ():
            name = f"{Path(job['path']).stem}_{job['split']}.npz"
            shutil.copyfile(job["out"], golden / name)
    return 1 if failed else 0


def _given(source: str) -> dict:
    path, _, query = source.partition("?")
    options = dict(parse_qsl(query))
    return {"path": str(Path(path).absolute()), **options}


def _fixtures() -> list[dict]:
    data = os.environ.get("JAXPFL_DATA")
    folder = Path(data).parent / "fixtures" / "tff" if data else None
    if folder is None or not folder.is_dir():
        print("no fixtures at hand: only files made here are compared", file=sys.stderr)
        return []
    jobs = [
        {"path": str(folder / "tff_sample.sqlite"), "features": SAMPLE, "split": split}
        for split in ("train", "test")
    ]
    for dataset in ("emnist", "shakespeare", "stackoverflow"):
        path = str(folder / f"tff_{dataset}_synthetic.sqlite")
        jobs.append({"path": path, "dataset": dataset, "split": "default_split"})
    return jobs


def _made(folder: Path) -> list[dict]:
    made = {"features": MIXED, "clients": 400, "most": 12, "seed": 0}
    path = str(folder / "mixed.sqlite")
    jobs: list[dict] = [{"path": path, "features": MIXED, "split": "train", "make": made}]
    jobs.append({"path": path, "features": MIXED, "split": "test"})
    for dataset, schema in SCHEMAS.items():
        # TFF's saver knows no booleans: such attributes are integers in its files.
        features = {
            name: ["int64" if feature.dtype == "bool" else feature.dtype, list(feature.shape)]
            for name, feature in schema.features.items()
        }
        made = {"features": features, "clients": 12, "most": 2, "seed": 1}
        path = str(folder / f"{dataset}.sqlite")
        jobs.append({"path": path, "dataset": dataset, "split": "train", "make": made})
        jobs.append({"path": path, "dataset": dataset, "split": "test"})
    return jobs


def _run_tff(jobs: Path) -> None:
    child = subprocess.Popen(
        [str(PYTHON), str(ROOT / "tools" / "tff_export.py"), str(jobs)], start_new_session=True
    )
    try:
        code = child.wait()
    finally:
        child.kill()
        # TFF may leave a `worker_binary` behind: it has the session of the process begun above.
        for left in _session(child.pid):
            os.kill(left, signal.SIGKILL)
            print(f"ended process {left}, which TFF left behind", file=sys.stderr)
    if code:
        raise SystemExit(f"tensorflow-federated ended with exit code {code}")


def _session(leader: int) -> list[int]:
    """The processes of a session but its leader."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            members += [pid] if pid != leader and os.getsid(pid) == leader else []
    return members


def _same(job: dict) -> bool:
    if "features" in job:
        features = {n: Feature(t, tuple(shape)) for n, (t, shape) in job["features"].items()}
    else:
        features = SCHEMAS[job["dataset"]].features
    with stream_tff(Path(job["path"]), Schema(features, "client"), job["split"]) as stream:
        ours = collect(stream)
    faults = []
    with np.load(job["out"], allow_pickle=False) as theirs:
        ids = json.loads(theirs["ids"].tobytes())
        if ours.client_ids.to_pylist() != ids:
            faults.append("client ids")
        if ours.sizes().tolist() != theirs["sizes"].tolist():
            faults.append("numbers of examples")
        names = [name.partition(":")[2] for name in theirs.files if ":" in name]
        if sorted(ours.columns) != sorted(set(names)):
            faults.append("names")
        for name in theirs.files:
            kind, _, column = name.partition(":")
            if kind == "array":
                array, held = theirs[name], ours.columns[column]
                if (array.dtype, array.shape) != (held.dtype, held.shape):
                    faults.append(f"{column}: {held.dtype} {held.shape}, TFF {array.dtype}")
                elif array.tobytes() != held.tobytes():
                    faults.append(f"values of {column}")
            elif kind == "bytes":
                texts = [text.encode() for text in ours.columns[column].to_pylist()]
                if [len(text) for text in texts] != theirs[f"lengths:{column}"].tolist():
                    faults.append(f"lengths of {column}")
                if b"".join(texts) != theirs[name].tobytes():
                    faults.append(f"texts of {column}")
    what = f"{Path(job['path']).name} [{job['split']}]"
    verdict = f"DIFFERENT: {', '.join(faults)}" if faults else "the same"
    print(f"{what:52}{len(ours):6} clients{ours.num_examples:8} examples  {verdict}")
    return not faults


if __name__ == "__main__":
    sys.exit(main())
