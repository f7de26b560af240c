"""Which programs JAX lowers, to count them: each is lowered before it is compiled."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def lowered_programs() -> Iterator[list[str]]:
    """The names of the programs that are lowered meanwhile, in their order."""
    names: list[str] = []

    def note(event: str, duration_secs: float, **about: object) -> None:
        if event.endswith("jaxpr_to_mlir_module_duration"):
            names.append(str(about.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
