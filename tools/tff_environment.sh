#!/usr/bin/env bash
# Makes .venv-tff: tensorflow-federated 0.87, alone with what it pins, for `make tff-check`.
#
#   tools/tff_environment.sh PYTHON
#
# It needs Python 3.11 (uv finds one), and cannot live beside a recent JAX. The jaxlib it pins can
# no longer be had, hence the override. Registries are the business of the user's own uv settings.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=.venv-tff
if command -v "${UV:-uv}" >/dev/null 2>&1; then
    uv=${UV:-uv}
else
    # uv is a package like any other: only its resolver can override a pin.
    [ -x .venv-uv/bin/uv ] || {
        "$1" -m venv .venv-uv &&
            .venv-uv/bin/python -m pip install --quiet --no-input \
                --disable-pip-version-check uv </dev/null
    } || {
        echo "tff-check needs uv: install it (pip install uv), or name it with UV=..." >&2
        exit 1
    }
    uv=.venv-uv/bin/uv
fi

echo "Installing tensorflow-federated 0.87 into $folder (over 2 GB)" >&2
rm -rf "$folder"
"$uv" venv --quiet --python 3.11 "$folder"
printf 'jax==0.4.13\njaxlib==0.4.13\n' |
    "$uv" pip install --quiet --python "$folder/bin/python" --override - \
        tensorflow-federated==0.87.0
