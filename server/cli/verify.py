"""`hallmark verify`: a receipt's signature, and its answers computed again by a server or by a model's folder."""

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2

from kernels.system.child_process import python_command
from qualification.common.exit_code import ExitCode
from qualification.common.flags import Commands, add_command
from qualification.common.regular_file import read_regular
from qualification.load.discovery import client_of, first_key
from qualification.receipt.content import SETTINGS
from qualification.receipt.keys import KeyFormatError, read_public_key
from qualification.receipt.replay import RefusedReplay, ReplayServer, ServerError
from qualification.receipt.signed import MAX_BYTES, Receipt, ReceiptError, parse_receipt
from qualification.receipt.verify import verify
from server.settings import flag_of

# Lines of the console of a server.
_READY = re.compile(r"ready on (http://127\.0\.0\.1:\d+)")
_REFUSED = "Hallmark refuses to serve"
_STOP_S = 10.0


def add_parser(commands: Commands) -> None:
    """Add `hallmark verify` to the commands of the program."""
    add_arguments(
        add_command(
            commands,
            "verify",
            "check a receipt, and compute its answers again",
            "Check the signature of a receipt, then have its answers computed again from the token ids, parameters and "
            "seeds in it. The exit code is the verdict: 0 equal, 1 other tokens or log probabilities, 2 not servable "
            "there, 3 receipt, signature or environment, 4 inconclusive.",
            "hallmark verify answer.json --url http://127.0.0.1:8000",
            "hallmark verify receipt.json --model ~/models/Qwen3-8B --key receipt_key.pub",
        )
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `hallmark verify`."""
    parser.add_argument(
        "receipt", metavar="RECEIPT", help="file of a receipt, or of an answer or stream with it; - is stdin"
    )
    group = parser.add_argument_group("what computes the answers again")
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument("--url", help="a server, e.g. http://127.0.0.1:8000")
    which.add_argument("--model", metavar="MODEL", help="or a model's folder or hub id, which a server of it serves")
    group.add_argument("--revision", metavar="NAME", help="of a hub id: branch, tag or commit")
    group.add_argument("--admin-url", help="where /version is, if the server has an admin port")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="its first key is sent as the bearer token")
    group.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer, or a start (default: 600)")
    group = parser.add_argument_group("signature")
    group.add_argument(
        "--key",
        type=Path,
        metavar="FILE",
        help="public key in PEM or base64 (default: those that the server's /version lists)",
    )


def run(args: argparse.Namespace) -> int:
    """Run with parsed flags, print, and return the exit code."""
    try:
        receipt = _read(args.receipt)
        key = None if args.key is None else read_public_key(args.key)
        if not args.timeout > 0:
            raise ValueError(f"--timeout must be positive, got {args.timeout:g}")
        bearer = None if args.api_key_file is None else first_key(args.api_key_file)
        with ExitStack() as stack:
            url = args.url or stack.enter_context(_served(args.model, args.revision, receipt, args.timeout))

            def client(url: str) -> httpx2.Client:
                return stack.enter_context(client_of(url, bearer=bearer, timeout_s=args.timeout))

            server = ReplayServer(client(url), client(args.admin_url or url))
            return verify(receipt, server.keys() if key is None else [key], server, _print)
    except ReceiptError as error:
        return _failed(f"receipt: FAIL: {args.receipt}: {error}")
    except KeyFormatError as error:
        return _failed(f"signature: FAIL: {args.key}: {error}")
    except (ServerError, RefusedReplay, OSError, ValueError, httpx2.InvalidURL) as error:
        return _failed(f"environment: FAIL: {error}")


def _failed(line: str) -> int:
    _print(" ".join(line.split()))
    return ExitCode.ENVIRONMENT


def _read(name: str) -> Receipt:
    """Raises OSError and ReceiptError."""
    if name == "-":
        return parse_receipt(sys.stdin.buffer.read(MAX_BYTES + 1))
    try:
        data = read_regular(Path(name), max_bytes=2 * MAX_BYTES)
    except OSError as error:
        raise ReceiptError(f"it cannot be read: {error.strerror or error}") from None
    return parse_receipt(data)


@contextlib.contextmanager
def _served(model: str, revision: str | None, receipt: Receipt, timeout_s: float) -> Iterator[str]:
    """The URL of a server of a model, with the receipt's settings, which ends with the context. Raises ServerError."""
    unknown = sorted(receipt.content.settings.keys() - set(SETTINGS))
    if unknown:
        raise ServerError(
            f"the receipt's setting {_name(unknown[0])} is none that decides numbers here: use the program of that "
            "server, or start one and give --url"
        )
    flags = ["--model", model, "--port", "0", "--served-model-name", receipt.content.model]
    flags += [] if revision is None else ["--revision", revision]
    if receipt.content.reproducible:
        flags.append("--reproducible")
    flags += [f"{flag_of(name)}={value}" for name, value in receipt.content.settings.items()]
    command = python_command("server.cli", "serve", *flags)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _url_of(process, timeout_s)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()


def _url_of(process: "subprocess.Popen[str]", timeout_s: float) -> str:
    """Wait until a server is ready. Raises ServerError."""
    assert process.stdout is not None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            if line.startswith(_REFUSED):
                raise ServerError(line)
            found = _READY.search(line)
            if found:
                return found[1]
        code = process.wait()
    finally:
        timer.cancel()
    why = f"was not ready within {timeout_s:g} s" if code == -signal.SIGKILL else f"ended with exit code {code}"
    raise ServerError(f"the server of the model {why}")


def _name(text: str) -> str:
    return text[:64].encode("ascii", "backslashreplace").decode()


def _print(line: str) -> None:
    print(line, flush=True)
