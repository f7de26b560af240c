"""Makes a folder of wheels for a rented machine with a GPU, which has no network.

    python tools/gpu_wheels.py build/gpu-wheels

The machine is assumed to have Linux on x86-64, Python 3.12, and what its makers put there: JAX for
CUDA, flax, optax, orbax-checkpoint, pyarrow, pandas, scipy, torch, tokenizers, safetensors and
transformers. The folder gets the rest of what the library and its benchmarks import, in the
versions of constraints.txt, and the library itself. On that machine, in the repository:

    python -m pip install --no-deps --no-index build/gpu-wheels/*.whl
    OUT=results python -m benchmarks.gpu
"""

import pathlib
import shutil
import subprocess
import sys

from packaging.requirements import Requirement

ROOT = pathlib.Path(__file__).parents[1]
PYTHON = "3.12"
# What is there of the library's own dependencies, and of its benchmarks'; torch brings jinja2, and
# flax brings rich and pyyaml.
THERE = (
    "jax",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
    "protobuf",
    "scipy",
    "pyarrow",
    "rich",
    "pyyaml",
    "jinja2",
)
# What is missing there, with its own dependencies.
MISSING = {
    "dp-accounting": ("absl-py", "attrs", "dm-tree", "mpmath", "wrapt"),
    "safetensors": (),
    "scikit-learn": ("joblib",),
    "threadpoolctl": (),
    "matplotlib": ("contourpy", "cycler", "fonttools", "kiwisolver", "pillow", "pyparsing"),
    "tyro": ("docstring-parser", "typeguard"),
}
# Of the C library; a wheel for an older one does on a newer one.
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")
# What may be sent to the machine along with the repository.
MOST_BYTES = 64 * 2**20


def pinned(names: list[str]) -> list[str]:
    """The lines of constraints.txt of these packages, for the machine's Python.

    Raises:
      SystemExit: a package has no line.
    """
    there = {
        "python_version": PYTHON,
        "python_full_version": f"{PYTHON}.0",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    found = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(there):
            found[requirement.name] = f"{requirement.name}{requirement.specifier}"
    lost = [name for name in names if name not in found]
    if lost:
        raise SystemExit(f"constraints.txt has no version of {lost[0]} for Python {PYTHON}")
    return [found[name] for name in names]


def main(folder: pathlib.Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    names = [name for package, needs in MISSING.items() for name in (package, *needs)]
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    platforms = [option for name in PLATFORMS for option in ("--platform", name)]
    fetch = ["download", "--no-deps", "--only-binary=:all:", "--python-version", PYTHON]
    subprocess.run([*pip, *fetch, *platforms, "--dest", str(folder), *pinned(names)], check=True)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([*pip, *build], check=True)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{len(list(folder.iterdir()))} wheels, {size / 2**20:.1f} MiB, in {folder}")
    if size > MOST_BYTES:
        raise SystemExit(f"the folder must be smaller than {MOST_BYTES / 2**20:.0f} MiB")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tools/gpu_wheels.py FOLDER")
    main(pathlib.Path(sys.argv[1]))
