"""Builds the wheel and the sdist of the last commit twice, and keeps them if they are the same.

    python tools/wheel.py dist

Each build is of a fresh clone, so that nothing is in it that is not committed. The two differ in
all that should not count: folder, permissions, the times of files, time zone, language and the
order of Python's sets. What they have in common is the time of the commit, and this environment,
whose versions constraints.txt pins: Python, its zlib, and the build backend. The folder also gets
SHA256SUMS, which `sha256sum --check` reads.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
SUMS = "SHA256SUMS"
# Of one build and the other: what must make no difference.
WORLDS = (
    {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "1"},
    {"TZ": "Asia/Kathmandu", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "2"},
)
UMASKS = (0o022, 0o077)


def git(*command: str, umask: int = 0o022) -> str:
    """The output of a git command in the repository."""
    done = subprocess.run(
        ["git", "-C", str(ROOT), *command], check=True, stdout=subprocess.PIPE, umask=umask
    )
    return done.stdout.decode().strip()


def built(number: int, place: pathlib.Path) -> dict[str, bytes]:
    """The content of the files of one build, by name.

    Args:
      number: of the build: 0 or 1.
      place: an empty folder.
    """
    clone, out, umask = place / ("clone" * (number + 1)), place / "out", UMASKS[number]
    git("clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone), umask=umask)
    commit = git("rev-parse", "HEAD")
    subprocess.run(
        ["git", "-C", str(clone), "checkout", "--quiet", commit], check=True, umask=umask
    )
    for file in clone.rglob("*"):
        if number and file.is_file() and ".git" not in file.relative_to(clone).parts:
            os.utime(file, (1e9, 1e9))
    world = {**os.environ, **WORLDS[number], "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct")}
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    done = subprocess.run(build, cwd=clone, env=world, umask=umask, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}the build of {clone} failed")
    return {file.name: file.read_bytes() for file in sorted(out.iterdir())}


def main(folder: pathlib.Path) -> None:
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        builds = [built(n, pathlib.Path(each)) for n, each in enumerate((first, second))]
    sums = [
        {name: hashlib.sha256(content).hexdigest() for name, content in build.items()}
        for build in builds
    ]
    for name in sorted(sums[0].keys() | sums[1].keys()):
        one, other = (each.get(name, "missing") for each in sums)
        if one != other:
            raise SystemExit(f"{name} differs between two builds of one commit: {one}, {other}")
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in builds[0].items():
        (folder / name).write_bytes(content)
    lines = [f"{digest}  {name}" for name, digest in sums[0].items()]
    (folder / SUMS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"the same bytes twice, of commit {git('rev-parse', 'HEAD')}:", *lines, sep="\n")
    if git("status", "--porcelain"):
        print("changes that are not committed are not in them", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python tools/wheel.py FOLDER")
    main(pathlib.Path(sys.argv[1]))
