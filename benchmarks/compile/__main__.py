"""Compiles every hot program for machines that are not at hand, and records what comes out.

    python -m benchmarks.compile                            # everything, an hour on two cores
    python -m benchmarks.compile --targets h200 --programs "word model" "DPO of Llama 3 8B"

For each program: seconds to compile; bytes of arguments, temporaries and results on one device
against its memory; collectives with their sizes; transfers from and to the host; operations of the
products by their type, and the least time that they and the bytes take at the data sheet's rates.
Nothing runs, so no kernel is timed, and a GPU's compiler does without autotuning.

Every program is compiled in a process of its own, so that one that fails does not stop the rest.
Needs the environment of `make compile-check`.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.compile import reading
from benchmarks.compile.programs import PROGRAMS, Program
from benchmarks.compile.targets import TARGETS, Target


@dataclasses.dataclass(frozen=True)
class Config:
    targets: tuple[str, ...] = tuple(TARGETS)
    programs: tuple[str, ...] = tuple(PROGRAMS)
    limit: int = 900  # seconds for the programs of a system on a target
    text: str | None = None  # a folder for the compiled programs' text


def row_of(target: Target, system: str, program: Program, folder: str | None) -> dict[str, Any]:
    """Compiles a program; what it says of itself."""
    start = time.perf_counter(), time.process_time()
    compiled = program.traced.lower().compile()
    seconds, processor = time.perf_counter() - start[0], time.process_time() - start[1]
    text = reading.text_of(compiled)
    if folder is not None:
        name = f"{target.name} {system} {program.what}.txt".replace(" ", "_")
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write(text)
    products = reading.products(reading.live(program.traced.jaxpr), program.trips)
    memory, cost = reading.memory(compiled), reading.cost(compiled)
    products = {name: n * program.copies / target.devices for name, n in products.items()}
    each = sum(products.values())
    return {
        "target": target.name,
        "system": system,
        "program": program.what,
        "work": program.work,
        "compile_s": round(seconds, 1),
        "compile_cpu_s": round(processor, 1),
        "memory_bytes": memory,
        "fits": memory["in_all"] <= target.memory,
        "model_bytes": program.model,
        "collectives": {
            kind: {"count": len(sizes), "bytes": sum(sizes), "largest": sizes[0]}
            for kind, sizes in reading.collectives(text).items()
        },
        "host_transfers": reading.transfers(text),
        "library_calls": reading.library_calls(text),
        "product_flops": products,
        "compiler_counts": cost,
        "least_seconds": max(each / target.flops, cost.get("bytes", 0.0) / target.bandwidth),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def child(target: str, system: str, folder: str | None) -> None:
    """Prints a row for each program of a system."""
    for program in PROGRAMS[system](TARGETS[target]):
        print(json.dumps(row_of(TARGETS[target], system, program, folder)), flush=True)


def main(config: Config) -> None:
    if config.text is not None:
        os.makedirs(config.text, exist_ok=True)
    for target in config.targets:
        for system in config.programs:
            command = [sys.executable, "-c", _CHILD, target, system, config.text or ""]
            environment = {**os.environ, **_ENVIRONMENT}
            try:
                done = subprocess.run(
                    command,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=config.limit,
                    check=False,
                )
                printed, error = done.stdout, done.stderr if done.returncode else ""
            except subprocess.TimeoutExpired as late:
                printed = late.stdout.decode() if isinstance(late.stdout, bytes) else ""
                error = f"not compiled within {config.limit} s"
            found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
            if error:
                # After the line that names the error, XLA says where in the code it was.
                lines = error.strip().splitlines()
                message = next((line for line in lines if "Error: " in line), lines[-1])[:300]
                found.append({"target": target, "system": system, "error": message})
            for row in found:
                print(_line(row), flush=True)
            harness.record("compile", found)


# No TPU is there, so that several processes may load its compiler.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_CHILD = """
import sys
from benchmarks.compile.__main__ import child
target, system, folder = sys.argv[1:]
child(target, system, folder or None)
"""


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['target']:8} {row['system']:26} {row['error']}"
    memory = row["memory_bytes"]
    collectives = ", ".join(
        f"{kind} {found['bytes'] / 1e6:.1f} MB" for kind, found in row["collectives"].items()
    )
    return (
        f"{row['target']:8} {row['system']:26} {row['program']:16} {row['compile_s']:6.1f} s  "
        f"{memory['arguments'] / 1e9:7.3f} + {memory['temporaries'] / 1e9:7.3f} GB  "
        f"{'fits' if row['fits'] else 'DOES NOT FIT'}  {collectives}"
    )


if __name__ == "__main__":
    main(tyro.cli(Config))
