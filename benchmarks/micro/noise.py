"""A release's noise: one vector of draws for all leaves against a draw for each leaf.

    python -m benchmarks.micro.noise

For the leaves of the EMNIST CNN (1.2 M parameters). `one vector` is what a release adds
(`privacy.mechanisms`), each device drawing its share; `leaf by leaf` draws each leaf with a key of
its own, which makes a program of threefry and erf_inv for each. Compile times are the process's CPU
seconds with the compilation cache off, the best of `repeats`; run times are taken by turns.
"""

import dataclasses
import time

import tyro

from benchmarks import harness


@dataclasses.dataclass(frozen=True)
class Config:
    repeats: int = 25
    compilations: int = 2
    devices: int | None = None  # virtual CPU devices; default one a core


def main(config: Config) -> list[dict]:
    harness.use_cpu_devices(config.devices)
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxpfl.federated import RunSecret, client_mesh
    from jaxpfl.models.cnn import emnist_cnn
    from jaxpfl.privacy import mechanisms

    jax.config.update("jax_enable_compilation_cache", False)
    mesh = client_mesh()
    like = jax.eval_shape(emnist_cnn().init, jax.random.key(0))
    leaves = jax.tree.leaves(like)
    key, parameters = RunSecret.reproducible(0).key("noise", ""), mechanisms.coordinates(like)

    def place(array, *spec):
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec(*spec)))

    def one_vector(key):
        # As the release does: rounded up, so that all devices get as much.
        padded = -(-parameters // 128) * 128
        drawn_W = place(mechanisms.standard_normal(key, (padded,)), "clients")
        return jax.tree.leaves(mechanisms.cut(place(drawn_W), like))

    def leaf_by_leaf(key):
        keys_L = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(leaves)))

        def add_draw(index, totals):
            drawn_by = jax.vmap(jax.random.fold_in, (0, None))(keys_L, index)
            return [
                total + jax.random.normal(drawn_by[leaf], total.shape)
                for leaf, total in enumerate(totals)
            ]

        totals = jax.lax.fori_loop(0, 2, add_draw, [jnp.zeros(leaf.shape) for leaf in leaves])
        even = [total.ndim > 0 and total.shape[0] % mesh.size == 0 for total in totals]
        shares = [
            place(total, "clients") if dealt else total
            for total, dealt in zip(totals, even, strict=True)
        ]
        return [place(share) * jnp.float32(0.5**0.5) for share in shares]

    functions = {"one vector": one_vector, "leaf by leaf": leaf_by_leaf}
    compile_seconds, compiled = {}, {}
    for name, function in functions.items():
        taken = []
        for _ in range(config.compilations):
            jax.clear_caches()
            lowered, start = jax.jit(function).lower(key), time.process_time()
            compiled[name] = lowered.compile()
            taken.append(time.process_time() - start)
        compile_seconds[name] = min(taken)
    calls = {name: (lambda draw=draw: draw(key)) for name, draw in compiled.items()}
    seconds = harness.interleaved(calls, config.repeats)
    rows = [
        {
            "what": name,
            "parameters": parameters,
            "leaves": len(leaves),
            "compile CPU seconds": compile_seconds[name],
            "milliseconds": 1e3 * seconds[name],
        }
        for name in functions
    ]
    harness.table(rows, ["what", "compile CPU seconds", "milliseconds"])
    print(f"recorded in {harness.record('noise', rows)}")
    return rows


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
