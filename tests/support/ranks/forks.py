"""Programs that are forks of one process, which imports PyTorch and the engine once: that takes 3 s of a core.

A test runs them by `Forks`. Followers of such a program are forks too: each is started as this module, which hands its
descriptor to the same process, and imports nothing but the standard library.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ADDRESS, FOLLOWER = "FORKS_ADDRESS", "FORKS_FOLLOWER"  # in the environment of a program
STUB = "support.ranks.forks"  # a follower


def begin(
    address: str, module: str, arguments: Sequence[str], environment: dict[str, str], descriptors: Sequence[int]
) -> socket.socket:
    """Start `module.main()` in a fork, whose last arguments are numbers of its copies of `descriptors`.

    descriptors  the first is its stdout and stderr, and no argument
    Returns what gives the exit status when the program has ended, and ends it when closed.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    request = json.dumps([module, list(arguments), environment]).encode()
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], list(descriptors))
    connection.sendall(request)
    return connection


class Forks:
    """The process of whom programs are forks."""

    def __init__(self, address: str) -> None:
        self._address = address

    def run(self, module: str, *arguments: str, follower: str = "", timeout_s: float = 250, **environment: str) -> int:
        """Return the exit status of `module.main()`.

        follower  the module that is its followers, where it starts any as `STUB`
        """
        names = {
            ADDRESS: self._address,
            FOLLOWER: follower,
            "GLOO_SOCKET_IFNAME": "lo",
        }  # a host's name may lead nowhere
        given = [module, *arguments]
        with begin(self._address, module, given, {**os.environ, **names, **environment}, [2]) as ended:
            ended.settimeout(timeout_s)
            return int(ended.recv(16))


@contextmanager
def forking() -> Iterator[Forks]:
    """Start the process, and end it and all programs."""
    path = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="forks-") as folder:
        address = str(Path(folder) / "socket")
        command = [sys.executable, "-m", "support.ranks.fork_server", address]
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline(), "no process to fork"
            yield Forks(address)
            server.communicate()  # it ends with its stdin


def main() -> None:
    """Be a follower, until the fork that is one in this process's place has ended."""
    descriptor = int(sys.argv[1])
    module = os.environ[FOLLOWER]
    with begin(os.environ[ADDRESS], module, [module], dict(os.environ), [2, descriptor]) as ended:
        os.close(descriptor)
        sys.exit(int(ended.recv(16) or 1))


if __name__ == "__main__":
    main()
