"""Appends what the four GANs of an image study draw to benchmarks/results/gan_inversion.jsonl.

python -m benchmarks.macro.gan_rows runs/gan_inversion_examples
"""

import argparse
from pathlib import Path

from benchmarks.harness import record, table
from jaxpfl import files

COLUMNS = ["inverted_share", "classifier_score", "epsilon"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Stores what the GANs of a study draw.")
    parser.add_argument("run", type=Path, help="the directory of a finished run")
    directory = parser.parse_args().run
    result = files.read_json(directory / "result.json")
    rows = [
        {"what": f"{directory.name}: {name}", **{column: found[column] for column in COLUMNS}}
        for name, found in result["runs"].items()
    ]
    table(rows, ["what", *COLUMNS])
    print(record("gan_inversion", rows))


if __name__ == "__main__":
    main()
