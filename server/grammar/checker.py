"""Checks of grammars before their requests are admitted: off the event loop, in time and memory that are limited."""

import asyncio
import contextlib
import hashlib
import os
import select
import subprocess
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kernels.system.child_process import python_command
from server.errors import InvalidGrammar
from server.grammar.check_process import LENGTH
from server.protocol.messages import Grammar

MAX_GRAMMAR_BYTES = 64 * 1024
TIME_LIMIT_S = 2.0
_START_LIMIT_S = 30.0
_NUM_PROCESSES = 2
_NUM_REMEMBERED = 1024  # verdicts; a digest and mostly no text
_UNSURE = "The grammar takes"  # begins a verdict that another time could be another one, and is not remembered

_COMMAND = python_command("server.grammar.check_process")


class GrammarChecker:
    """Compiles each grammar in one of two processes, which start with the first grammar; remembers verdicts.

    `check` is called on an event loop, of any thread.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self.time_limit_s = time_limit_s
        self._threads = ThreadPoolExecutor(_NUM_PROCESSES, thread_name_prefix="grammar-check")
        self._own = threading.local()  # each thread's process
        self._processes: set[_Process] = set()
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._end = weakref.finalize(self, _end, self._threads, self._processes)

    async def check(self, grammar: Grammar) -> None:
        """Raise InvalidGrammar where no answer could be bound to a grammar, or only at too high a cost."""
        encoded = msgspec.msgpack.encode(msgspec.structs.replace(grammar, param=""))
        num_bytes = len(encoded)
        if num_bytes > MAX_GRAMMAR_BYTES:
            limit = f"a grammar may have {MAX_GRAMMAR_BYTES} bytes"
            raise InvalidGrammar(f"{grammar.param}: {limit}, this one has {num_bytes}.", param=grammar.param)
        key = hashlib.blake2b(encoded, digest_size=16).digest()
        found = self._verdicts.get(key)
        if found is None:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, self._verdict, grammar)
            if not found.startswith(_UNSURE):
                self._verdicts[key] = found
            if len(self._verdicts) > _NUM_REMEMBERED:
                self._verdicts.popitem(last=False)
        else:
            self._verdicts.move_to_end(key)
        if found:
            raise InvalidGrammar(f"{grammar.param}: {found}", param=grammar.param)

    def close(self) -> None:
        """End the processes; no check is answered afterwards."""
        self._end()

    def _verdict(self, grammar: Grammar) -> str:
        """Return what is wrong with a grammar; empty where nothing is."""
        process: _Process | None = getattr(self._own, "process", None)
        if process is None:
            process = self._own.process = _Process()
            self._processes.add(process)
        try:
            return process.ask(msgspec.msgpack.encode(grammar), self.time_limit_s)
        except (TimeoutError, OSError) as error:
            self._own.process = None
            self._processes.discard(process)
            process.kill()
            if isinstance(error, TimeoutError):
                return f"{_UNSURE} longer than {self.time_limit_s:g} s to compile."
            return f"{_UNSURE} too much memory to compile."


def _end(threads: ThreadPoolExecutor, processes: "set[_Process]") -> None:
    threads.shutdown(wait=False, cancel_futures=True)
    for process in [*processes]:
        process.kill()


class _Process:
    """A checking process, ready for grammars. Starting it takes 0.5 s."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._read(_START_LIMIT_S)

    def ask(self, message: bytes, limit_s: float) -> str:
        """Send a grammar and return the answer. Raises TimeoutError, and OSError where the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(LENGTH.pack(len(message)) + message)
        self._process.stdin.flush()
        return self._read(limit_s).decode()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # what was not sent yet
                stream.close()

    def _read(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        due_at = time.monotonic() + limit_s
        source, data, size = self._process.stdout.fileno(), b"", LENGTH.size
        while len(data) < size:
            if not select.select([source], [], [], max(0.0, due_at - time.monotonic()))[0]:
                raise TimeoutError
            part = os.read(source, size - len(data))
            if not part:
                raise OSError("the checking process has ended")
            data += part
            if len(data) == LENGTH.size:
                size += LENGTH.unpack(data)[0]
        return data[LENGTH.size :]
