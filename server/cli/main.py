"""The program `hallmark`. What stops a server is one line on standard error and exit code 2."""

import argparse
import contextlib
import importlib.metadata
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry

from qualification.bench.attention import command as bench_command
from qualification.bench.serve import command as serve_command
from qualification.canary import command as canary
from qualification.commands import matrix as matrix_command
from qualification.commands import qualify as qualify_command
from qualification.exit_code import ExitCode
from qualification.report import command as report_command
from server.bench.steps import command as steps_command
from server.cli.console import Console
from server.edge.admission import Admission, Edge
from server.edge.keys import NO_KEYS, Keys
from server.edge.lifecycle import Lifecycle
from server.edge.uvicorn_server import Server, uvicorn_config
from server.errors import SettingsError, StartError
from server.http.app import create_admin_app, create_app
from server.log import configure_logging
from server.model.load.digests import model_digests
from server.settings import GenerationConfig, LoadFormat, Settings, flag_of, read_settings
from server.supervisor.client import EngineClient
from server.telemetry.metrics import Metrics
from server.telemetry.objectives import DEFAULT_OBJECTIVES, load_objectives
from server.telemetry.tracing import Tracing
from server.text.chat_template import ChatTemplate
from server.text.sampling_defaults import SamplingDefaults, load_sampling_defaults
from server.text.tokenizer import Tokenizer

BACKLOG = 2048  # uvicorn's own
# For bytes that a peer does not take: without it a closed connection keeps them for as long as he stays.
UNREAD_TIMEOUT_MS = 60_000


def main(argv: Sequence[str] | None = None) -> int:
    """The program's entry; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = build_parser().parse_args(argv)
        if arguments.command == "serve":
            flags = {name: text for name, text in vars(arguments).items() if name != "command"}
            return serve(read_settings(flags, os.environ))
        return _judge(arguments) if arguments.command in _VERDICTS else doctor()
    except StartError as error:
        print(f"hallmark: {' '.join(error.message.split())}", file=sys.stderr)
        return ExitCode.ENVIRONMENT if _VERDICTS.keys() & set(argv[:1]) else 2  # 2 is their verdict on speed


def _judge(arguments: argparse.Namespace) -> int:
    try:
        return _VERDICTS[arguments.command](arguments)
    except (
        BrokenPipeError,
        KeyboardInterrupt,
    ):  # `| head` or a person has seen enough; an output that was not read is no pass
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return ExitCode.INCONCLUSIVE


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hallmark", description="An LLM server that proves which attention kernel served each request."
    )
    parser.add_argument("--version", action="version", version=f"hallmark {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve_parser = commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False)
    for field in msgspec.structs.fields(Settings):
        description, metavar = _documented(field.type)
        default = "" if field.default is None else f" (default: {_text(field.default)})"
        options: dict[str, Any] = {"action": _Switch} if _is_switch(field.type) else {"metavar": metavar}
        serve_parser.add_argument(
            flag_of(field.name),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=(description + default).replace("%", "%%"),
            **options,
        )
    qualify_command.add_arguments(
        commands.add_parser("qualify", help="prove a model's attention shapes on this machine", allow_abbrev=False)
    )
    matrix_command.add_arguments(commands.add_parser("matrix", help="show, verify or compare evidence"))
    report_command.add_arguments(commands.add_parser("report", help="what the evidence says, as one page"))
    benches = commands.add_parser("bench", help="measure attention paths, servers or steps").add_subparsers(
        dest="bench", required=True, metavar="WHAT"
    )
    bench_command.add_arguments(
        benches.add_parser("attention", help="beside FA2, FA3, cuDNN and FlexAttention", allow_abbrev=False)
    )
    serve_command.add_arguments(
        benches.add_parser("serve", help="load on any OpenAI-compatible server, beside others", allow_abbrev=False)
    )
    steps_command.add_arguments(
        benches.add_parser("steps", help="the engine's own, by length, batch and context", allow_abbrev=False)
    )
    canary.add_arguments(commands.add_parser("canary", help="ask a running server whether it may take traffic"))
    commands.add_parser("doctor", help="show this machine and the attention paths that can run on it")
    return parser


class _Switch(argparse.BooleanOptionalAction):
    """`--name` and `--no-name`, kept as the text that a variable would hold."""

    def __call__(
        self, _parser: object, namespace: argparse.Namespace, _values: object, option_string: str | None = None
    ) -> None:
        is_off = option_string is not None and option_string.startswith("--no-")
        setattr(namespace, self.dest, "false" if is_off else "true")


def _is_switch(annotation: object) -> bool:
    return getattr(annotation, "__origin__", annotation) is bool


def _documented(annotation: object) -> tuple[str, str]:
    """A setting's description, and what stands for its value in the help text."""
    kind = getattr(annotation, "__origin__", annotation)
    meta = getattr(annotation, "__metadata__", (msgspec.Meta(description=""),))[-1]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return meta.description or "", "{" + ",".join(member.value for member in kind) + "}"
    return meta.description or "", "VALUE"


def qualify(args: argparse.Namespace) -> int:
    """The kernels, and when they pass and it is asked for the whole model; returns the exit code."""
    _compute_here()
    code = qualify_command.run(args)
    if code != ExitCode.PASS or not args.full_model:
        return code
    from server.bench.full_model import command as full_model_command  # imports torch

    return full_model_command.run(args)


def bench(args: argparse.Namespace) -> int:
    if args.bench == "serve":
        return serve_command.run(args)
    _compute_here()
    return steps_command.run(args, os.environ) if args.bench == "steps" else bench_command.run(args)


# Commands whose exit code is a verdict.
_VERDICTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "canary": canary.run,
    "qualify": qualify,
    "matrix": matrix_command.run,
    "report": report_command.run,
    "bench": bench,
}


def _compute_here() -> None:
    """Set what the engine's process sets, before torch is loaded: threads that spin take the cores from everybody
    else, and PyTorch's profiler writes two lines a call to standard error.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def _text(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default.value if isinstance(default, Enum) else default)


def version() -> str:
    return importlib.metadata.version("hallmark-serve")


def serve(settings: Settings) -> int:
    """Serve until a signal ends it. Raises StartError, also where only the engine finds that it cannot start."""
    configure_logging(settings.log_format)
    settings, folder = resolve(settings)
    keys = Keys.load(settings)
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
    is_recommended = settings.generation_config is GenerationConfig.AUTO
    defaults = load_sampling_defaults(folder) if is_recommended else SamplingDefaults()
    listening = bind(settings.host, settings.port, "--port")
    admin_listening = None if settings.admin_port is None else bind(settings.host, settings.admin_port, "--admin-port")
    metrics, tracing = make_telemetry(settings)
    console = Console(
        metrics,
        model=settings.model_name,
        url=url_of(listening),
        print_line=_print,
        needs_key=keys.tenants is not None,
        on_attestation=tracing.attested,
    )
    engine = EngineClient(settings, console)
    edge = Edge(
        settings=settings,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        metrics=metrics,
        tracing=tracing,
        lifecycle=Lifecycle(),
        admission=Admission(settings.max_queued_requests, settings.max_queued_tokens),
        model_digests=model_digests(folder, has_weights=settings.load_format is not LoadFormat.DUMMY),
        version=version(),
        started_at=int(time.time()),
        sampling_defaults=defaults,
    )
    admin = None if admin_listening is None else serve_admin(edge, admin_listening, keys)
    server = Server(
        uvicorn_config(create_app(edge, keys)),
        edge.lifecycle,
        settings.shutdown_grace_s,
        must_end=lambda: engine.refused is not None and engine.refused.is_final,
    )
    server.run(sockets=[listening])
    if admin is not None:
        admin.should_exit = True
    if engine.refused is not None and engine.refused.is_final:
        raise StartError(engine.refused.message)
    return 0


def make_telemetry(settings: Settings) -> tuple[Metrics, Tracing]:
    """Raises SettingsError for objectives or a collector's address that cannot be used."""
    objectives = DEFAULT_OBJECTIVES if settings.slo_file is None else load_objectives(Path(settings.slo_file))
    metrics = Metrics(settings.model_name, CollectorRegistry(), version=version(), objectives=objectives)
    count_dropped, ratio = metrics.traffic.spans_dropped, settings.trace_ratio
    tracing = Tracing(settings.otlp_endpoint, version=version(), count_dropped=count_dropped, ratio=ratio)
    return metrics, tracing


def resolve(settings: Settings) -> tuple[Settings, Path]:
    """The settings with the model as a folder (a hub id is fetched), and that folder.

    Raises ModelError, and SettingsError where the folder of matrices is none.
    """
    if settings.matrix is not None and not Path(settings.matrix).is_dir():
        raise SettingsError(f"--matrix {settings.matrix}: no such folder")
    if not Path(settings.model).is_dir():
        from server.model.load.load import resolve_model  # imports torch, which this process can do without

        name = settings.served_model_name or settings.model
        folder = resolve_model(settings.model, settings.load_format)
        settings = msgspec.structs.replace(settings, model=str(folder), served_model_name=name)
    return settings, Path(settings.model)


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A socket that listens on the address. Raises SettingsError that names the flag."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT_MS)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)  # at once: with SO_REUSEADDR another process may bind a port that has no listener yet
    except OSError as error:
        sock.close()
        raise SettingsError(f"{flag} {port} on {host} cannot be bound: {error.strerror or error}") from None
    return sock


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve_admin(edge: Edge, sock: socket.socket, keys: Keys = NO_KEYS) -> uvicorn.Server:
    """Serve the admin routes from a thread of their own: a scrape must not delay a token."""
    server = uvicorn.Server(uvicorn_config(create_admin_app(edge, keys)))
    threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="admin", daemon=True).start()
    _print(f"Metrics and the plan are on {url_of(sock)}")
    return server


def doctor() -> int:
    import torch  # only this command computes in this process

    from kernels.catalog import PATHS
    from kernels.device import num_cores, read_fingerprint
    from server.cli.doctor import report

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for line in report(read_fingerprint(device, num_threads=num_cores()), PATHS):
        _print(line)
    return 0


def _print(line: str) -> None:
    """What cannot be written is lost: a full disk or a closed pipe must not keep the engine from being served."""
    with contextlib.suppress(OSError):
        print(line, flush=True)
