"""Takes the network away from the tests: none can reach anything beyond this machine.

On Linux the process moves into a network namespace of its own, whose one interface is loopback. The
kernel then refuses every address outside to this process and to all that it starts, in whatever
language they are written. Where the kernel does not allow this, as in many containers, an audit
hook refuses them to Python's sockets in this process alone; `close` says which of the two holds.
"""

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

OUTSIDE = "192.0.2.1"
"""An address that is reserved for documentation: nobody has it."""

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_SET_FLAGS, _UP = 0x8914, 1
# What Python tells before it asks the system, with the position of the address.
_ASKED = {
    "socket.connect": 1,
    "socket.sendto": 1,
    "socket.sendmsg": 1,
    "socket.getaddrinfo": 0,
    "socket.gethostbyname": 0,
}


def close() -> str:
    """Takes the network away, as early as possible; returns for whom it is closed.

    It must be called before threads are started: those that run already keep the network.
    """
    # Tried in another process first, which may be left between the two worlds.
    probe = subprocess.run([sys.executable, "-I", __file__], capture_output=True, check=False)
    if probe.returncode == 0:
        _move()
        return "closed by the kernel for all processes of the tests"
    sys.addaudithook(_refuse)
    return "closed for Python's sockets in this process alone: the kernel allows no namespace"


def reaches_out() -> bool:
    """Whether there is a way to addresses outside; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect((OUTSIDE, 9))
        except (OSError, RuntimeError):
            return False
    return True


def _move() -> None:
    """Moves this process into a network namespace of its own, and starts its loopback.

    Raises:
      OSError: the kernel does not allow it.
    """
    user, group = os.getuid(), os.getgid()
    try:
        _unshare(_NEW_NETWORK)
    except OSError:
        # Whoever may not do that may in a user namespace, with the same user in it.
        _unshare(_NEW_USER | _NEW_NETWORK)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        _start_loopback()
        # In the new namespace it may do everything, also write files whose mode forbids it.
        _drop_capabilities()
    else:
        _start_loopback()


def _start_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh22x", b"lo", _UP))


def _drop_capabilities() -> None:
    header, nothing = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capabilities are not dropped")


def _unshare(flags: int) -> None:
    # `os.unshare` is of Python 3.12.
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "unshare"):
        raise OSError("this system has no namespaces")
    if library.unshare(flags):
        raise OSError(ctypes.get_errno(), "no namespace")


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook."""
    if event not in _ASKED:
        return
    address = arguments[_ASKED[event]]
    host = address[0] if isinstance(address, tuple) else address
    # A path, or nothing at all, is of a Unix socket.
    named = event.startswith("socket.get") or isinstance(address, tuple)
    if named and not _is_here(host):
        raise RuntimeError(f"a test must not reach out: {event} {host!r}")


def _is_here(host: Any) -> bool:
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


if __name__ == "__main__":
    _move()
