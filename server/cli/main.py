"""The program `hallmark`. What stops a server is one line on standard error and exit code 2."""

import argparse
import contextlib
import importlib.metadata
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry

from qualification.canary import command as canary
from qualification.commands import matrix as matrix_command
from qualification.commands import qualify as qualify_command
from qualification.common.exit_code import ExitCode
from qualification.common.flags import add_command
from qualification.report import command as report_command
from server.cli import bench as bench_command
from server.cli import completion as completion_command
from server.cli import models as models_command
from server.cli import serve_flags
from server.cli import verify as verify_command
from server.cli.console import Console
from server.cli.parser import Parser, parsed
from server.edge.admission import Admission
from server.edge.keys import NO_KEYS, Keys
from server.edge.lifecycle import Lifecycle
from server.edge.tls import Tls
from server.edge.uvicorn_server import Server, uvicorn_config
from server.errors import ModelError, SettingsError, StartError
from server.http.app import create_admin_app, create_app
from server.http.images.fetch import MediaFetcher
from server.http.images.reader import ImageReader
from server.http.services import Program, ServedImages, ServedModel, Services, Telemetry
from server.log import configure_logging
from server.model.images.settings import ImageSettings
from server.model.load.digests import model_digests
from server.model.load.pooling import read_pooling
from server.model.load.source import is_hub_id, model_folder
from server.receipt.receipts import Receipts
from server.setting_files import read_env_file
from server.settings import PREFIX, GenerationConfig, LoadFormat, MetricsCompat, Settings, Task, flag_of, read_settings
from server.supervisor.client import EngineClient
from server.telemetry.metrics import Metrics
from server.telemetry.objectives import DEFAULT_OBJECTIVES, load_objectives
from server.telemetry.tracing import Tracing
from server.text.answer.syntax import choose_syntax
from server.text.chat_template import ChatTemplate
from server.text.sampling_defaults import SamplingDefaults, load_sampling_defaults
from server.text.tokenizer import Tokenizer

BACKLOG = 2048  # uvicorn's own
# Of bytes that the client does not read: otherwise a slow client holds them until it disconnects.
UNREAD_TIMEOUT_MS = 60_000


def main(argv: Sequence[str] | None = None) -> int:
    """The program's entry; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv:
            build_parser().print_help()
            return 2  # nothing was done
        arguments = parsed(build_parser(), argv)
        if arguments.command == "serve":
            return serve(_settings(arguments))
        if arguments.command == "models":
            return models_command.run(arguments)
        if arguments.command == "completion":
            print(completion_command.script_for(arguments.shell, build_parser()))
            return 0
        return _judge(arguments) if arguments.command in _VERDICTS else doctor()
    except StartError as error:
        print(f"hallmark: {' '.join(error.message.split())}", file=sys.stderr)
        return ExitCode.ENVIRONMENT if _VERDICTS.keys() & set(argv[:1]) else 2  # 2 is their verdict on speed


def _settings(arguments: argparse.Namespace) -> Settings:
    """Read the settings of `hallmark serve`, and say which of them are of the current folder's `.env`."""
    env_file = read_env_file(Path(".env"), PREFIX)
    settings = read_settings(serve_flags.texts_of(arguments), os.environ, env_file)
    if env_file.variables:
        _print(f"Settings of {env_file.path.absolute()}: {', '.join(env_file.variables)}")
    return settings


def _judge(arguments: argparse.Namespace) -> int:
    try:
        return _VERDICTS[arguments.command](arguments)
    except (
        BrokenPipeError,
        KeyboardInterrupt,
    ):  # `| head` or a person has seen enough; an output that was not read is no pass
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return ExitCode.INCONCLUSIVE


def build_parser() -> Parser:
    parser = Parser(
        prog="hallmark",
        description="An LLM server that proves which kernels served each request.",
        epilog="""examples:
  hallmark serve                         the demo model on http://127.0.0.1:8000
  hallmark serve FOLDER                  a model of your own
  hallmark models                        which models are served, and on what
  hallmark doctor                        what can run on this machine
  hallmark COMMAND --help                the flags of a command, with examples""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hallmark {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    serve_flags.add_parser(commands)
    qualify_command.add_parser(commands)
    matrix_command.add_parser(commands)
    report_command.add_parser(commands)
    bench_command.add_parser(commands)
    canary.add_parser(commands)
    verify_command.add_parser(commands)
    models_command.add_parser(commands)
    completion_command.add_parser(commands)
    add_command(
        commands,
        "doctor",
        "show this machine and the kernel paths that can run on it",
        "Show this machine and the kernel paths that can run on it, and why the others cannot; the last line says "
        "whether a server can run here (exit code 0) or not (3).",
        "hallmark doctor",
    )
    return parser


def qualify(args: argparse.Namespace) -> int:
    """The kernels, and when they pass and it is asked for the whole model; returns the exit code."""
    _compute_here()
    folder = None
    if args.model is not None and (args.revision is not None or is_hub_id(str(args.model))):
        folder = model_folder(str(args.model), args.revision, has_weights=False, say=_print)
    code = qualify_command.run(args, folder)
    if code != ExitCode.PASS or not args.full_model:
        return code
    from server.full_model import command as full_model_command  # imports torch

    return full_model_command.run(args, folder)


def bench(args: argparse.Namespace) -> int:
    _compute_here()
    return bench_command.run(args, os.environ)


# Settings that say something of images alone.
_OF_IMAGES = (
    "limit_images",
    "max_image_pixels",
    "max_image_tokens",
    "max_num_batched_image_tokens",
    "allowed_media_hosts",
)

# Commands whose exit code is a verdict.
_VERDICTS: dict[str, Callable[[argparse.Namespace], int]] = {
    "canary": canary.run,
    "verify": verify_command.run,
    "qualify": qualify,
    "matrix": matrix_command.run,
    "report": report_command.run,
    "bench": bench,
}


def _compute_here() -> None:
    """Set what the engine's process sets, before torch is loaded: threads that spin take the cores from everybody
    else, PyTorch's profiler writes two lines a call to standard error, and a machine's name may lead ranks nowhere.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def version() -> str:
    return importlib.metadata.version("hallmark-serve")


def serve(settings: Settings) -> int:
    """Serve until a signal ends it. Raises StartError, also where only the engine finds that it cannot start."""
    configure_logging(settings.log_format)
    with _readable_model():
        settings, folder = resolve(settings)
    keys, tls = Keys.load(settings), Tls.load(settings)
    listening = bind(settings.host, settings.port, "--port")
    admin_listening = None if settings.admin_port is None else bind(settings.host, settings.admin_port, "--admin-port")
    with _readable_model():
        services = assemble(settings, folder, keys, url_of(listening, tls))
    engine = services.engine
    admin = None if admin_listening is None else serve_admin(services, admin_listening, keys, tls)
    server = Server(
        uvicorn_config(create_app(services, keys), tls),
        services.lifecycle,
        settings.shutdown_grace_s,
        must_end=lambda: engine.refused is not None and engine.refused.is_final,
        on_hangup=_on_hangup(keys, services, tls),
    )
    server.run(sockets=[listening])
    if admin is not None:
        admin.should_exit = True
    if engine.refused is not None and engine.refused.is_final:
        raise StartError(engine.refused.message)
    return 0


@contextlib.contextmanager
def _readable_model() -> Iterator[None]:
    """Raises ModelError for a path that the system refuses even to look at, by permission or length, say."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        raise ModelError(f"{error.filename} cannot be read: {error.strerror}") from error


def assemble(settings: Settings, folder: Path, keys: Keys, url: str) -> Services:
    """Put together the application of a model, whichever server runs it; nothing is started yet.

    settings  as `resolve` returns them, with `folder`
    url       of the API, for the lines that the console prints
    Raises StartError where the settings, the tokenizer or the chat template cannot be used.
    """
    template = ChatTemplate.load(folder)
    tokenizer = Tokenizer.load(folder, template)
    pooling = read_pooling(folder, settings)
    is_recommended = settings.generation_config is GenerationConfig.AUTO
    images, no_images = images_of(settings, folder)
    fetcher = MediaFetcher.of(settings.allowed_media_hosts, settings.max_body_bytes)  # read where none is seen, too
    defaults = load_sampling_defaults(folder) if is_recommended else SamplingDefaults()
    metrics, tracing = make_telemetry(settings)
    console = Console(
        metrics,
        model=settings.model_name,
        url=url,
        print_line=_print,
        needs_key=keys.tenants is not None,
        task=Task.GENERATE if pooling is None else pooling.task,
        on_attestation=tracing.attested,
        on_replay=tracing.replayed,
    )
    model = ServedModel(
        names=settings.model_names,
        tokenizer=tokenizer,
        template=template,
        syntax=choose_syntax(template, settings.tool_call_parser, settings.reasoning_parser),
        sampling_defaults=defaults,
        special_tokens_in_text=settings.special_tokens_in_text,
        pooling=pooling,
        digests=model_digests(folder, has_weights=settings.load_format is not LoadFormat.DUMMY),
        images=images,
        no_images=no_images,
    )
    return Services(
        settings=settings,
        program=Program(version(), started_at=int(time.time())),
        model=model,
        engine=EngineClient(settings, console),
        telemetry=Telemetry(metrics, tracing),
        lifecycle=Lifecycle(),
        admission=Admission(settings.max_queued_requests, settings.max_queued_tokens, settings.max_queued_bytes),
        images=None if images is None else image_reader(images, fetcher, settings),
        receipts=Receipts.load(settings) if pooling is None else None,
    )


def images_of(settings: Settings, folder: Path) -> tuple[ServedImages | None, str | None]:
    """Return the images that the model sees, or None and perhaps why.

    Raises SettingsError where it sees none, and a setting of images is given.
    """
    if settings.limit_images == 0:
        return None, "--limit-images is 0"
    try:
        found, why = ImageSettings.load(folder), None
    except ModelError as error:
        found, why = None, error.message
    if found is not None:
        return ServedImages(found, settings.limit_images), None
    default = Settings()
    given = next((it for it in _OF_IMAGES if getattr(settings, it) != getattr(default, it)), None)
    if given is not None:
        reason = "" if why is None else f" ({why})"
        raise SettingsError(f"{flag_of(given)} is of images, which this model does not see{reason}: leave it out")
    return None, why


def image_reader(images: ServedImages, fetcher: MediaFetcher, settings: Settings) -> ImageReader:
    """Make the reader of the requests' images."""
    return ImageReader(images.settings, fetcher, settings.max_image_pixels)


def _on_hangup(keys: Keys, services: Services, tls: Tls | None) -> Callable[[], None] | None:
    """Return what SIGHUP does: keys and the certificate are read again, and receipts get another key. None: it ends the
    server.

    A server that someone has started in a terminal, with no key of theirs, ends with it.
    """
    settings, receipts = services.settings, services.receipts
    has_files = keys != NO_KEYS or tls is not None or (receipts is not None and settings.receipt_key_file is not None)
    if not has_files and sys.stdin is not None and sys.stdin.isatty():
        return None

    def read_again() -> None:
        traffic = services.telemetry.metrics.traffic
        if keys != NO_KEYS and keys.reload(settings):
            traffic.create_keys(keys.names)
        if receipts is not None:
            receipts.keys.rotate()
        if tls is not None:
            tls.reload()

    return read_again


def make_telemetry(settings: Settings) -> tuple[Metrics, Tracing]:
    """Raises SettingsError for objectives or a collector's address that cannot be used."""
    objectives = DEFAULT_OBJECTIVES if settings.slo_file is None else load_objectives(Path(settings.slo_file))
    metrics = Metrics(
        settings.model_name,
        CollectorRegistry(),
        version=version(),
        objectives=objectives,
        has_vllm_names=settings.metrics_compat is MetricsCompat.VLLM,
    )
    count_dropped, ratio = metrics.traffic.spans_dropped, settings.trace_ratio
    tracing = Tracing(settings.otlp_endpoint, version=version(), count_dropped=count_dropped, ratio=ratio)
    return metrics, tracing


def resolve(settings: Settings) -> tuple[Settings, Path]:
    """The settings with the model as a folder (a hub id is fetched), and that folder.

    Raises ModelError, and SettingsError where the folder of matrices is none.
    """
    if settings.matrix is not None and not Path(settings.matrix).is_dir():
        raise SettingsError(f"--matrix {settings.matrix}: no such folder")
    folder = model_folder(
        settings.model, settings.revision, has_weights=settings.load_format is not LoadFormat.DUMMY, say=_print
    )
    if folder != Path(settings.model):
        name = settings.served_model_name or settings.model
        settings = msgspec.structs.replace(settings, model=str(folder), served_model_name=name)
    return settings, folder


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


def url_of(sock: socket.socket, tls: Tls | None = None) -> str:
    host, port = sock.getsockname()[:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def serve_admin(
    services: Services, sock: socket.socket, keys: Keys = NO_KEYS, tls: Tls | None = None
) -> uvicorn.Server:
    """Serve the admin routes from a thread of their own: a scrape must not delay a token."""
    server = uvicorn.Server(uvicorn_config(create_admin_app(services, keys), tls))
    threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="admin", daemon=True).start()
    _print(f"Metrics and the plan are on {url_of(sock, tls)}")
    return server


def doctor() -> int:
    import torch  # only this command computes in this process

    from kernels.catalog import paths_on
    from kernels.system.device import num_cores, read_fingerprint
    from server.cli.doctor import diagnose

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    diagnosis = diagnose(read_fingerprint(device, num_threads=num_cores()), paths_on(device))
    for line in diagnosis.lines:
        _print(line)
    return ExitCode.PASS if diagnosis.can_serve else ExitCode.ENVIRONMENT


def _print(line: str) -> None:
    """Print a line, or lose it: a full disk or a closed pipe must not end the server."""
    with contextlib.suppress(OSError):
        print(line, flush=True)
