"""The `args` of the application in the YAML: settings of the server, and how long its replicas wait."""

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from server.errors import SettingsError
from server.settings import Settings, read_settings

# Of these settings Ray has its own.
_RAYS_OWN = {
    "host": "http_options.host",
    "port": "http_options.port",
    "root_path": "route_prefix",
    "shutdown_grace_s": "graceful_shutdown_timeout_s of the deployment",
    **dict.fromkeys(
        ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"), "http_options of Ray's proxy"
    ),
}
_MAX_S = 86_400.0


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Arguments that the application is built from.

    settings         by field name, as texts, numbers or truth values
    hold_s           how long a request waits at a replica whose engine restarts, before another replica is tried
    replace_after_s  a replica whose engine was not ready for so long is replaced
    max_excess       requests that a replica may have more than the least loaded one, before affinity yields
    """

    settings: dict[str, str | bool | int | float] = {}
    hold_s: float = 5.0
    replace_after_s: float = 300.0
    max_excess: int = 8

    @property
    def flags(self) -> dict[str, str]:
        """The settings as the command line would have them."""
        return {
            name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in self.settings.items()
        }


def read_arguments(args: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> tuple[Arguments, Settings]:
    """The arguments, and the settings that they and the HALLMARK_* variables mean.

    Raises SettingsError, which names what is wrong, for what is unknown, unparsable or Ray's to say.
    """
    known = [field.name for field in msgspec.structs.fields(Arguments)]
    _check_known(args, known, "args")
    settings = args.get("settings") or {}
    if not isinstance(settings, Mapping):
        raise SettingsError(f"args.settings: expected settings by name, got {type(settings).__name__}")
    _check_known(settings, [field.name for field in msgspec.structs.fields(Settings)], "args.settings")
    for name, value in settings.items():
        if not isinstance(value, str | bool | int | float):
            kind = "nothing" if value is None else type(value).__name__
            raise SettingsError(f"args.settings.{name}: expected a text, a number or a truth value, got {kind}")
    for name, owner in _RAYS_OWN.items():
        if name in settings:
            raise SettingsError(f"args.settings.{name}: on Ray Serve this is {owner}")
    if settings.get("admin_port"):
        raise SettingsError(
            f"args.settings.admin_port: replicas share a machine, so that {settings['admin_port']} can serve one of "
            "them; give 0, which takes a free port in each, or leave it out"
        )
    try:
        arguments = msgspec.convert({**args, "settings": settings}, Arguments)
    except msgspec.ValidationError as error:
        raise SettingsError(f"args: {str(error).replace('`$.', '`')}") from None
    for name in ("hold_s", "replace_after_s"):
        if not 0 <= getattr(arguments, name) <= _MAX_S:
            raise SettingsError(f"args.{name}: expected 0 to {_MAX_S:g} seconds, got {getattr(arguments, name):g}")
    if arguments.max_excess < 0:
        raise SettingsError(f"args.max_excess: expected 0 or more requests, got {arguments.max_excess}")
    return arguments, read_settings(arguments.flags, environ)


def check_gpus(deployments: Iterable[Mapping[str, Any]], settings: Settings) -> None:
    """Raise SettingsError where a deployment asks Ray for GPUs, and for another number than a replica has ranks."""
    for deployment in deployments:
        num_gpus = (deployment.get("ray_actor_options") or {}).get("num_gpus")
        if num_gpus and num_gpus != settings.tensor_parallel_size:
            raise SettingsError(
                f"ray_actor_options.num_gpus: expected {settings.tensor_parallel_size}, a GPU for each rank of "
                f"tensor_parallel_size, got {num_gpus:g}"
            )


def _check_known(given: Mapping[str, Any], known: list[str], where: str) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SettingsError(f"{where}.{name} is no setting{hint}")
