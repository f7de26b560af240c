"""Reads the text of a program as JAX lowers it for the devices of a run, before it is compiled.

A primitive is not always lowered to what its name says. This finds whatever reaches outside the
program: custom calls, callbacks, channels, and draws with a state. It cannot replace the list of
primitives (`flow.lanes`): an operation that mixes lanes may be an ordinary loop here.
"""

import re
from collections.abc import Iterable

from jaxpfl.errors import InformationLeak

# JAX lowers the places of arrays, linear algebra and selection to these. Products, convolutions,
# FFT, sorts and draws need none; libraries for them are chosen when the text is compiled.
_KNOWN = re.compile(
    r"""
    Sharding | SPMDFullToShardShape | SPMDShardToFullShape | annotate_device_placement
    | xla\.sdy\.\w+ | ApproxTopK | PartialReduce
    | lapack_[a-z0-9]+_ffi
    | (cu|hip)(solver_[a-z0-9]+_ffi | sparse_gtsv2_ffi | hybrid_[a-z0-9_]+)
    | (cu|hip)_lu_pivots_to_permutation | cu_cholesky_update_ffi
    | Eigh | Qr | LuDecomposition | ProductOfElementaryHouseholderReflectors
    """,
    re.VERBOSE,
)
# As it is printed with and without a dialect's own syntax, and as a text of the user's, in quotes.
_CALL = re.compile(r'\bcustom_call"?[ \(]\s*(?:@(?:"([^"]*)"|([\w.$-]+)))?')
_OUTSIDE = re.compile(
    r"\b(?:stablehlo|mhlo|vhlo)\.(send|recv|infeed|outfeed|rng|rng_bit_generator)\b"
)


def require_known_calls(texts: Iterable[str], platform: str, label: str) -> None:
    """Refuses programs with calls, sends or receives that JAX's own operations do not need.

    Args:
      texts: StableHLO, as `jax.stages.Lowered.as_text` gives it.
      platform: that it was lowered for, as `jax.Device.platform` names it.
      label: of the query.

    Raises:
      InformationLeak: names the call.
    """
    text = "\n".join(texts)
    strange = next((repr(match[1]) for match in _OUTSIDE.finditer(text)), None)
    for match in _CALL.finditer(text):
        target = match[1] or match[2] or ""
        if not _KNOWN.fullmatch(target):
            strange = f"a custom call of {target!r}"
            break
    if strange is not None:
        raise InformationLeak(
            f"the program of query {label!r}, as it is lowered for a {platform}, has {strange}, "
            "which JAX's own operations do not need: take out what makes it"
        )
