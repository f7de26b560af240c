#!/usr/bin/env bash
# Prints the path of the newest supported Python on this machine that gets the newest JAX.
set -euo pipefail

# pyenv and uv keep Pythons that are not on the PATH.
for version in 3.13 3.12; do
    for candidate in "$(command -v "python$version" || true)" \
        "$(uv python find --no-python-downloads "$version" 2>/dev/null || true)" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python3; do
        if [ -n "$candidate" ] && "$candidate" -c \
            "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
            echo "$candidate"
            exit 0
        fi
    done
done
echo "No Python 3.13 or 3.12 found: name one with NEWEST_PYTHON=/path/to/python3.13" >&2
exit 1
