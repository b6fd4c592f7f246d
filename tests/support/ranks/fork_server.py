"""The process of whom `forks.py` has programs forked: `python -m support.ranks.fork_server ADDRESS`."""

import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from typing import NoReturn

from kernels.system.hang_up import wait_for_hang_up

# With all that they import. None of them starts a thread when it is imported.
IMPORTED = (
    "support.ranks.rank_program",
    "support.ranks.ranks_engine",
    "support.ranks.ranks_follower",
)


def main() -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for the programs
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(16)
    print("listening", flush=True)
    with selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        events.register(sys.stdin, selectors.EVENT_READ)
        while all(key.fileobj is listener for key, _ in events.select()):
            connection, _ = listener.accept()
            with connection:
                if not os.fork():
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    listener.close()
                    serve(connection)


def serve(connection: socket.socket) -> NoReturn:
    """Run one program, whose end the other side hears, and end."""
    size, descriptors, _, _ = socket.recv_fds(connection, 4, 8)
    with connection.makefile("rb") as stream:
        module, arguments, environment = json.loads(stream.read(int.from_bytes(size, "big")))
    program = os.fork()
    if not program:
        connection.close()
        become(module, arguments, environment, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)

    def end_with_the_other_side() -> None:
        wait_for_hang_up(connection)
        os.kill(program, signal.SIGKILL)

    threading.Thread(target=end_with_the_other_side, daemon=True).start()
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with suppress(BrokenPipeError):  # where that side has ended it
        connection.sendall(str(status).encode())
    os._exit(0)


def become(module: str, arguments: list[str], environment: dict[str, str], descriptors: list[int]) -> NoReturn:
    """Be the program."""
    output, *passed = descriptors
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [*arguments, *map(str, passed)]
    try:
        importlib.import_module(module).main()
    except SystemExit as end:
        os._exit(int(end.code or 0))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
