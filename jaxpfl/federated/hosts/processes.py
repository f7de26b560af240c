"""The processes of one computation, which `jax.distributed` joined, and what they agree on.

All share one set of devices, and execute the same program. Process 0 alone has a run's secret,
ledger and files. What follows from these, from a remote model or from a clock is a decision: all
processes come to it in the same order, process 0 computes it, and all go on with its value, or with
its exception.

Words go over the key-value store of `jax.distributed`, in which a reader waits as long as it needs,
and arrays over the devices. A collective of CPUs gives up after 30 seconds, so that processes meet
at a decision before one: each posts that it is there, or why it failed.

When a process is gone, JAX ends the others, without an exception that Python could catch: at once
with process 0, which keeps the store, and `LOST_BEFORE` seconds after any other that `join` joined.
A thread notices the latter earlier, once the run has begun, says so and ends the process.

The others print the sentence of a process that failed. Only errors of this package are quoted,
because the text of any other one may hold a client's value.
"""

import itertools
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from jaxpfl import errors
from jaxpfl.errors import InputError, Interrupted
from jaxpfl.federated import mesh

T = TypeVar("T")

# Seconds without a sign of life after which a process counts as gone.
LOST_AFTER = 30.0
# Seconds after which JAX ends the others if a process is lost before the run has begun. Under way,
# LOST_AFTER must pass first, on a busy machine too, because JAX says no sentence.
LOST_BEFORE = 60
# Seconds that the others wait for a process that has not begun the run, and may load its data.
JOINED_WITHIN = 300.0
_SIGN_EVERY = 2.0
# A process that waits for a decision hears of a failure in time to clean up; one that computes does
# not.
_GRACE = 5.0
# Each process makes the same groups, and meets in the same order, so that the numbers agree.
_GROUPS, _MEETINGS = itertools.count(), itertools.count()
_UNDER_WAY = threading.Lock()
# What stands for an array in a message.
_ARRAY = "an array of process 0"


def join(how: str) -> None:
    """Joins the other processes of a command; call it before JAX is asked for its devices.

    `how` is "auto" for what JAX finds out by itself (Slurm, Kubernetes, Cloud TPU, Open MPI), or
    HOST:PORT,INDEX/COUNT, such as "10.0.0.5:1234,0/2" for the first of two.
    """
    settings: dict[str, Any] = {}
    if how != "auto":
        match = re.fullmatch(r"([^,]*:[^,]*),([0-9]+)/([0-9]+)", how)
        if match is None:
            raise InputError(
                "--distributed: expected auto, or HOST:PORT,INDEX/COUNT such as "
                f"10.0.0.5:1234,0/2 for the first of two processes, found {how!r}"
            )
        address, index, count = match.groups()
        if int(index) >= int(count):
            raise InputError(
                f"--distributed: the processes of {count} are 0 to {int(count) - 1}, found {index}"
            )
        settings |= dict(
            coordinator_address=address, num_processes=int(count), process_id=int(index)
        )
    try:
        jax.distributed.initialize(**settings, heartbeat_timeout_seconds=LOST_BEFORE)
    except (ValueError, RuntimeError) as error:
        hint = "; name the address: --distributed HOST:PORT,INDEX/COUNT" if how == "auto" else ""
        reason = str(error).splitlines()[0]
        raise InputError(f"--distributed {how}: no connection: {reason}{hint}") from error


class Group(AbstractContextManager["Group"]):
    """The processes that carry out one run; a context manager that watches them.

    If an exception leaves it in one process, the others raise the same with that one's sentence at
    their next decision. Those that do not come to one within 5 seconds end.
    """

    current: "Group | None" = None
    """The one that is under way: there can be only one, as `jax.distributed` joins once."""

    def __init__(self) -> None:
        self.index, self.size = jax.process_index(), jax.process_count()
        self._name, self._number, self._alone = "", 0, False
        # The last one that a decision has raised, in all processes.
        self._shared_error: BaseException | None = None
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, name="jaxpfl-watch", daemon=True)

    def __enter__(self) -> "Group":
        numbers = Counter(device.process_index for device in jax.devices())
        if len(set(numbers.values())) > 1:
            listed = ", ".join(str(numbers[index]) for index in range(self.size))
            raise InputError(f"all processes must have as many devices, found {listed} of them")
        if not _UNDER_WAY.acquire(blocking=False):
            raise InputError(
                "several processes can share one run at a time, and another one is under way in "
                "this process; nothing was charged"
            )
        self._name = f"jaxpfl/{next(_GROUPS)}"
        self._watch.start()
        Group.current = self
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if isinstance(error, jax.errors.JaxRuntimeError):
                reason = str(error).splitlines()[0]
                if reason.startswith("RESOURCE_EXHAUSTED"):
                    error = InputError(
                        f"process {self.index} ran out of memory: give a smaller chunk, fewer "
                        f"clients_per_bucket or more processes ({reason})"
                    )
                    self._fail(error)
                    raise error
                # It fails as soon as another process is gone. Which one is seen a little later, and
                # then the watching thread ends this process.
                time.sleep(LOST_AFTER + 2 * _SIGN_EVERY)
            self._leave(error)
        finally:
            Group.current = None
            self._over.set()
            self._watch.join()
            _UNDER_WAY.release()

    def _leave(self, error: BaseException | None) -> None:
        if error is None:
            # No process ends well alone.
            self.decide("its end", lambda: None)
        elif error is not self._shared_error:
            self._fail(error)
        else:
            # What another one saves may take long, and it would take this one for dead.
            with suppress(BaseException):
                self.decide("its end", lambda: None)

    def decide(self, label: str, compute: Callable[..., T], status: Any = None) -> T:
        """What `compute` returns or raises in process 0, which alone calls it, in all processes.

        All must come to it with the same label. Inside, process 0 is alone: a decision within one
        is computed, and nobody else asked.

        Args:
          compute: its value is made of JSON's types and arrays; a tuple arrives as a list.
          status: of this process, in JSON's types. If it is given, `compute` gets those of all; of
            process 0 the object itself, so that it sees what is added meanwhile.
        """
        statuses = [status]
        if self._alone:
            return compute() if status is None else compute(statuses)
        number, self._number, arrays = self._number, self._number + 1, list[np.ndarray]()
        if self.index:
            self._post(number, {"label": label, "status": status})
            message = json.loads(self._get(number, 0), object_hook=partial(_emptied, arrays))
            if "failed" in message:
                self._shared_error = _error_of(message)
                raise self._shared_error
            self._send(arrays)
            return message["value"]
        self._alone = True
        try:
            statuses += self._statuses(number, label)
            value = compute() if status is None else compute(statuses)
            message = json.dumps({"value": value}, default=partial(_named, arrays))
        except BaseException as error:
            self._shared_error = error
            self._post(number, self._failure(error))
            raise
        finally:
            self._alone = False
        mesh.store().key_value_set(self._key(number, 0), message)
        self._send(arrays)
        return value

    def _statuses(self, number: int, label: str) -> list[Any]:
        """The statuses of processes 1, 2, ... at a decision; waits for all."""
        posted = [json.loads(self._get(number, index)) for index in range(1, self.size)]
        for index, message in enumerate(posted, 1):
            if "failed" in message:
                raise _error_of(message, f"process {index}: ")
            if message["label"] != label:
                raise InputError(
                    f"process {index} has come to {message['label']}, process 0 to {label}: all "
                    "must be given the same; nothing more is charged"
                )
        if number:
            # All have read it.
            mesh.store().key_value_delete(f"{self._name}/{number - 1}")
        return [message["status"] for message in posted]

    def _send(self, arrays: list[np.ndarray]) -> None:
        """Fills the arrays of the other processes with those of process 0."""
        from jax.experimental import multihost_utils

        if not (size := sum(array.nbytes for array in arrays)):
            return
        content = bytes(size) if self.index else b"".join(array.tobytes() for array in arrays)
        # Words, because many small numbers take many instructions.
        words = np.frombuffer(content + bytes(-size % 4), np.uint32)
        mesh.store().wait_at_barrier(f"{self._name}/arrays/{next(_MEETINGS)}", mesh.WAIT_MS)
        content = np.asarray(multihost_utils.broadcast_one_to_all(words)).view(np.uint8)
        for array in arrays if self.index else ():
            array.reshape(-1).view(np.uint8)[:] = content[: array.nbytes]
            content = content[array.nbytes :]

    def _fail(self, error: BaseException) -> None:
        """Lets the other processes know of an error that they do not share."""
        self._post(self._number, self._failure(error))
        mesh.store().key_value_set(self._key("gone", self.index), self._said(error))

    def _failure(self, error: BaseException) -> dict[str, Any]:
        interrupted = isinstance(error, KeyboardInterrupt)
        kind = Interrupted.__name__ if interrupted else type(error).__name__
        number = getattr(error, "number", signal.SIGINT) if interrupted else None
        return {"failed": kind, "sentence": self._said(error), "number": number}

    def _said(self, error: BaseException) -> str:
        """The sentence that the other processes may print of an error in this one."""
        if type(error).__module__.partition(".")[0] == __name__.partition(".")[0]:
            return str(error)
        return f"{type(error).__name__}, of which the output of process {self.index} says more"

    def _post(self, number: int, message: dict[str, Any]) -> None:
        mesh.store().key_value_set(self._key(number, self.index), json.dumps(message))

    def _key(self, kind: object, number: object) -> str:
        return f"{self._name}/{kind}/{number}"

    def _get(self, kind: object, number: int) -> str:
        while True:
            # Between two calls of a second, signals are answered.
            try:
                return mesh.store().blocking_key_value_get(self._key(kind, number), 1_000)
            except jax.errors.JaxRuntimeError as error:
                if not str(error).startswith("DEADLINE_EXCEEDED"):
                    raise

    def _look(self) -> None:
        """Gives signs of life, looks for those of others, and ends the process if one is gone."""
        seen = {index: ("", time.monotonic()) for index in range(self.size) if index != self.index}
        for sign in itertools.count():
            if self._over.wait(_SIGN_EVERY):
                return
            try:
                client = mesh.store()
                client.key_value_set(self._key("sign", self.index), str(sign), True)
                signs = dict(client.key_value_dir_get(f"{self._name}/sign/"))
                gone = client.key_value_dir_get(f"{self._name}/gone/")
            except Exception:
                signs, gone = {}, []
                if not self._over.is_set():
                    _end("process 0 of this run cannot be reached any more")
            for key, sentence in gone:
                if self._over.wait(_GRACE):
                    return
                _end(f"process {key.rsplit('/')[-1]} of this run ended: {sentence}", orderly=True)
            now = time.monotonic()
            for index, (last, when) in seen.items():
                newest, limit = signs.get(self._key("sign", index), ""), LOST_AFTER
                silent = "gave no sign of life for"
                if not last:
                    limit, silent = JOINED_WITHIN, "did not begin it within"
                if newest != last:
                    seen[index] = (newest, now)
                elif now - when > limit and not self._over.is_set():
                    _end(f"process {index} of this run {silent} {limit:g} s")


def _end(sentence: str, *, orderly: bool = False) -> NoReturn:
    """Ends this process at once: JAX would wait for the others, and then end it without a word."""
    advice = "what was saved is kept: resume the run, with any number of processes"
    with suppress(OSError):
        os.write(2, f"\nerror: {sentence}; {advice}\n".encode())
    if orderly:
        # The other process lives, and would wait 100 seconds for one that has not said good-bye.
        leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        leaving.start()
        leaving.join(_GRACE)
    os._exit(1)


def shared() -> AbstractContextManager[Any]:
    """The processes that share a run; where this one is alone, nothing."""
    mesh.all_devices()  # Without one, or forked after JAX had begun, nothing is begun.
    return Group() if mesh.several() else nullcontext()


def decide(label: str, compute: Callable[..., T], status: Any = None) -> T:
    """`Group.decide` of the processes that share the run; where this one is alone, it computes."""
    if Group.current is not None:
        return Group.current.decide(label, compute, status)
    return compute() if status is None else compute([status])


@contextmanager
def alone() -> Iterator[None]:
    """Inside, process 0 decides without the others, which do not come to these decisions."""
    if (group := Group.current) is None:
        yield
        return
    group._alone = True
    try:
        yield
    finally:
        group._alone = False


def led(context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """The context in process 0, which has the files; in the others, nothing."""
    return context if mesh.leads() else nullcontext()


def _named(arrays: list[np.ndarray], value: Any) -> dict[str, Any]:
    """What stands for an array, which is sent after the message."""
    if not hasattr(value, "dtype") or value.dtype == object:
        raise TypeError(f"a decision cannot hold {type(value).__name__}")
    arrays.append(np.asarray(value))
    return {_ARRAY: [str(arrays[-1].dtype), arrays[-1].shape]}


def _emptied(arrays: list[np.ndarray], value: dict[str, Any]) -> Any:
    """An array for what `_named` made, to be filled; other dictionaries as they are."""
    if value.keys() != {_ARRAY}:
        return value
    dtype, shape = value[_ARRAY]
    arrays.append(np.empty(shape, dtype))
    return arrays[-1]


def _error_of(message: dict[str, Any], whose: str = "") -> BaseException:
    """The error that another process has raised."""
    kind, sentence = message["failed"], whose + message["sentence"]
    if kind == Interrupted.__name__:
        return Interrupted(message["number"], sentence)
    error = getattr(errors, kind, None)
    return RuntimeError(f"this run failed: {sentence}") if error is None else error(sentence)
