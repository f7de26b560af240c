"""Messages between the processes of one computation, which `jax.distributed` joined.

Such processes share one set of devices, but each has memory and files of its own. One of them,
process 0, holds a run's secret, ledger and files. It tells the others what to compute with it
(`federated.hosts.shared_rounds`). A computation that does not arrange this is refused.

Words go over the key-value store of `jax.distributed`, in which a reader waits as long as it needs,
and bytes over the devices. A collective of CPUs gives up after 30 seconds, so that processes meet
in the store before one.

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
import threading
import time
from typing import Any, NoReturn

import jax
import numpy as np

from jaxpfl.errors import InputError
from jaxpfl.federated import mesh

LOST_AFTER = 30.0
"""Seconds without a sign of life after which a process counts as gone."""

LOST_BEFORE = 45
"""Seconds after which JAX ends the others if a process is lost before the run has begun."""

JOINED_WITHIN = 300.0
"""Seconds that the others wait for a process that has not begun the run, and may load its data."""

_SIGN_EVERY = 2.0
# A process that waits for a message hears of a failure in time to clean up; one that computes does
# not.
_GRACE = 5.0
# Each process makes the same groups, and meets in the same order, so that the numbers agree.
_GROUPS, _MEETINGS = itertools.count(), itertools.count()
_UNDER_WAY = threading.Lock()


def join(how: str) -> None:
    """Joins the other processes of a command; call it before JAX is asked for its devices.

    Args:
      how: "auto" for what JAX finds out by itself (Slurm, Kubernetes, Cloud TPU, Open MPI), or
        HOST:PORT,INDEX/COUNT, such as "10.0.0.5:1234,0/2" for the first of two.
    """
    given: dict[str, Any] = {}
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
        given |= dict(coordinator_address=address, num_processes=int(count), process_id=int(index))
    try:
        jax.distributed.initialize(**given, heartbeat_timeout_seconds=LOST_BEFORE)
    except (ValueError, RuntimeError) as error:
        hint = "; name the address: --distributed HOST:PORT,INDEX/COUNT" if how == "auto" else ""
        reason = str(error).splitlines()[0]
        raise InputError(f"--distributed {how}: no connection: {reason}{hint}") from error


class Group:
    """The processes that carry out one run; a context manager that watches them.

    If an exception leaves it in process 0, the others hear {"failed": its class, "sentence": ...},
    and those that do not listen within 5 seconds end. If one leaves it in another process, its
    sentence is that process's answer {"failed": sentence}, where one is awaited; all processes end.
    """

    def __init__(self) -> None:
        self.index, self.size = jax.process_index(), jax.process_count()
        self._name = ""
        self._broadcasts = self._questions = 0
        self._failed, self._awaited = False, True
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, name="jaxpfl-watch", daemon=True)

    def __enter__(self) -> "Group":
        if not _UNDER_WAY.acquire(blocking=False):
            raise InputError(
                "several processes can share one run at a time, and another one is under way in "
                "this process; nothing was charged"
            )
        self._name = f"jaxpfl/{next(_GROUPS)}"
        self._watch.start()
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
            if error is not None:
                self._fail(error)
        finally:
            self._over.set()
            self._watch.join()
            _UNDER_WAY.release()

    def _fail(self, error: BaseException) -> None:
        """Lets the other processes know of an error that leaves the run."""
        if self._failed:
            return  # because process 0 did
        if not self.index:
            number, kind = getattr(error, "number", None), type(error).__name__
            self.tell(failed=kind, sentence=self._said(error), number=number)
        elif self._awaited:
            self.answer(failed=self._said(error))
        mesh.store().key_value_set(self._key("gone", self.index), self._said(error))

    def _said(self, error: BaseException) -> str:
        """The sentence that the other processes may print of an error in this one."""
        if type(error).__module__.partition(".")[0] == __name__.partition(".")[0]:
            return str(error)
        return f"{type(error).__name__}, of which the output of process {self.index} says more"

    def tell(self, **message: Any) -> None:
        """Process 0 tells the others something public, in JSON's types."""
        mesh.store().key_value_set(self._key("broadcast", self._broadcasts), json.dumps(message))
        self._broadcasts += 1

    def hear(self) -> dict[str, Any]:
        """The next message of process 0; waits for it."""
        heard = json.loads(self._get(self._key("broadcast", self._broadcasts)))
        self._broadcasts += 1
        self._failed, self._awaited = "failed" in heard, "awaited" in heard
        return heard

    def answer(self, **message: Any) -> None:
        """Another process answers process 0, at first and to what it `awaited`; JSON's types."""
        key = self._key(f"answer/{self._questions}", self.index)
        mesh.store().key_value_set(key, json.dumps(message))
        self._questions, self._awaited = self._questions + 1, False

    def answers(self) -> list[dict[str, Any]]:
        """The answers of processes 1, 2, ...; waits for all."""
        kind = f"answer/{self._questions}"
        self._questions += 1
        return [json.loads(self._get(self._key(kind, index))) for index in range(1, self.size)]

    def send(self, content: bytes) -> None:
        """Process 0 sends bytes, which the others `receive`."""
        self._bytes(np.frombuffer(content, np.uint8))

    def receive(self, size: int) -> bytes:
        """The bytes that process 0 sends."""
        return self._bytes(np.zeros(size, np.uint8))

    def _bytes(self, content: np.ndarray) -> bytes:
        from jax.experimental import multihost_utils

        if not content.size:
            return b""
        # Words, because many small numbers take many instructions.
        words = np.frombuffer(content.tobytes() + bytes(-content.size % 4), np.uint32)
        mesh.store().wait_at_barrier(f"{self._name}/bytes/{next(_MEETINGS)}", mesh.WAIT_MS)
        words = multihost_utils.broadcast_one_to_all(words)
        return np.asarray(words).tobytes()[: content.size]

    def _key(self, kind: str, number: int) -> str:
        return f"{self._name}/{kind}/{number}"

    def _get(self, key: str) -> str:
        return mesh.store().blocking_key_value_get(key, mesh.WAIT_MS)

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
    """Ends this process at once: JAX would wait for the others, and then end it without a word.

    The files are as after any crash.

    Args:
      orderly: the other process lives, and would wait 100 seconds for one that has not said
        good-bye before it could exit.
    """
    advice = "what was saved is kept: resume the run, with any number of processes"
    os.write(2, f"\nerror: {sentence}; {advice}\n".encode())
    if orderly:
        leaving = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        leaving.start()
        leaving.join(_GRACE)
    os._exit(1)
