"""The tests cannot reach the network, nor can what they start."""

import subprocess
import sys

import pytest

from tests import offline

_CONNECT = f"""
import ctypes, errno, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
made = libc.socket(socket.AF_INET, socket.SOCK_DGRAM, 0)
host = socket.inet_aton({offline.OUTSIDE!r})
address = struct.pack("=H2s4s8x", socket.AF_INET, b"\\0\\x09", host)
failed = libc.connect(made, address, len(address))
assert failed and ctypes.get_errno() == errno.ENETUNREACH, (failed, ctypes.get_errno())
"""


def test_neither_python_nor_native_code_nor_another_process_reaches_out():
    assert not offline.reaches_out()
    try:
        exec(_CONNECT, {})
    except AssertionError:
        pytest.skip("this machine's kernel lets no process leave its network")
    subprocess.run([sys.executable, "-c", _CONNECT], check=True)


def test_without_a_namespace_pythons_sockets_are_refused():
    script = """
import socket, sys
from tests import offline
sys.addaudithook(offline._refuse)
assert not offline.reaches_out()
for asked in (lambda: socket.getaddrinfo("jaxpfl.example.com", 443),
              lambda: socket.gethostbyname("jaxpfl.example.com"),
              lambda: socket.create_connection(("10.0.0.1", 443))):
    try:
        asked()
    except RuntimeError as error:
        assert "must not reach out" in str(error)
    else:
        raise AssertionError("not refused")
with socket.create_server(("localhost", 0)) as server:
    socket.create_connection(server.getsockname()).close()
left, right = socket.socketpair()
left.sendall(b"x")
assert right.recv(1) == b"x"
left.close(); right.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True)
