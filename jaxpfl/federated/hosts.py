"""What is known of other processes, in a computation that `jax.distributed` spreads over several.

Such processes share one set of devices, but each has memory and files of its own. A run must draw
one secret and keep one ledger, so that what does not arrange this between processes is refused.
"""

import jax

from jaxpfl.errors import InputError


def several() -> bool:
    """Whether this process is one of several that `jax.distributed` joined."""
    # Asked first, because the second question takes hold of the accelerators.
    return jax.distributed.is_initialized() and jax.process_count() > 1


def require_one_process(what: str) -> None:
    """Refuses to go on as one of several processes, before anything is written or charged.

    Args:
      what: cannot be shared among processes, as the beginning of a sentence.

    Raises:
      InputError: there are several.
    """
    if several():
        raise InputError(
            f"{what} one process, found {jax.process_count()} processes of jax.distributed: each "
            "would draw a secret and keep a ledger of its own; nothing was charged"
        )
