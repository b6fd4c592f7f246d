"""Start Ray on this machine with the application of a YAML, or bring the YAML to a cluster that runs.

    python deploy/ray/up.py deploy/ray/hallmark.yaml                                   until SIGTERM or SIGINT
    python deploy/ray/up.py --address http://127.0.0.1:8265 deploy/ray/hallmark.yaml   deploys, updates, waits, ends

What is wrong in the YAML ends it with one line and exit code 2, before anything is started.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKEN = Path.home() / ".ray" / "auth_token"
sys.path[0] = str(ROOT)  # not this folder: `ray` is a package of others
# A cluster that up.py has started asks for the token that Ray has written there; Ray looks before it is imported.
if any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")) or TOKEN.exists():
    os.environ.setdefault("RAY_AUTH_MODE", "token")

import yaml  # noqa: E402
from pydantic import BaseModel, ValidationError  # noqa: E402
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient  # noqa: E402
from ray.serve.config import AutoscalingConfig  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402

from deploy.ray.arguments import check_gpus, read_arguments  # noqa: E402
from server.errors import SettingsError, StartError  # noqa: E402

FRONT = "deploy.ray.front:middlewares"
APPLICATION = "deploy.ray.app:build"
_DEPLOY_LIMIT_S = 3600.0  # a model of many GPUs may load for long
_FRONTS_SETTINGS = ("max_body_bytes", "max_queued_bytes", "receive_timeout_s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, metavar="YAML")
    parser.add_argument("--address", metavar="URL", help="dashboard of a cluster that runs; default: start Ray here")
    parser.add_argument("--check", action="store_true", help="only read the YAML")
    options = parser.parse_args()
    try:
        config = read_config(options.config, os.environ)
        if options.check:
            print(f"{options.config}: whole", flush=True)
            return 0
        if options.address:
            return deploy(options.config, options.address)
        return run(options.config, config)
    except StartError as error:
        print(f"hallmark: {' '.join(error.message.split())}", file=sys.stderr)
        return 2


def read_config(path: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """The YAML, checked as far as this machine can. Raises SettingsError, which names the entry."""
    try:
        config = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {error}") from None
    if not isinstance(config, dict):
        raise SettingsError(f"{path}: expected a mapping with `applications`")
    try:
        schema = ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"{path}: {where}: {first['msg']}, got {first.get('input')!r:.80}") from None
    if unknown := unknown_key(config, schema):
        raise SettingsError(f"{path}: {unknown} is no setting of Ray Serve")
    ours = [app for app in config["applications"] if app["import_path"] == APPLICATION]
    if not ours:
        raise SettingsError(f"{path}: no application has the import_path {APPLICATION}")
    for application in ours:
        try:
            _, settings = read_arguments(application.get("args") or {}, environ)
            check_gpus(application.get("deployments") or (), settings)
        except SettingsError as error:
            raise SettingsError(f"{path}: {error.message}") from None
        if application.get("route_prefix", "/") != "/":
            raise SettingsError(f"{path}: route_prefix: expected /, got {application['route_prefix']}")
    return config


def unknown_key(given: Any, model: Any, where: str = "") -> str | None:
    """The first key that Ray's schemas do not have: they take any, and ignore it."""
    if where.endswith("autoscaling_config."):  # which the schema of a deployment has as any mapping
        model = AutoscalingConfig(**given)
    if isinstance(given, dict) and isinstance(model, BaseModel):
        fields = type(model).model_fields
        names = {field.alias or name: name for name, field in fields.items()} | {name: name for name in fields}
        for key, value in given.items():
            if key not in names:
                return f"{where}{key}"
            found = unknown_key(value, getattr(model, names[key]), f"{where}{key}.")
            if found:
                return found
    if isinstance(given, list) and isinstance(model, list):
        for index, (value, each) in enumerate(zip(given, model, strict=False)):
            found = unknown_key(value, each, f"{where}{index}.")
            if found:
                return found
    return None


def run(path: Path, config: dict[str, Any]) -> int:
    """Start Ray here and serve until a signal comes; running requests may then finish, a second signal ends them."""
    os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = FRONT
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # Ray's own is 15: replicas would yield to all else on the machine
    settings = next(app for app in config["applications"] if app["import_path"] == APPLICATION).get("args") or {}
    for name in _FRONTS_SETTINGS:  # the same limits in the proxy
        if name in (settings.get("settings") or {}):
            os.environ[f"HALLMARK_{name.upper()}"] = str(settings["settings"][name])
    import ray  # here, for it reads the variables
    from ray import serve

    ended = threading.Event()
    num_signals = 0

    def note(*_: object) -> None:
        nonlocal num_signals
        num_signals += 1
        ended.set()

    context = ray.init(include_dashboard=True, dashboard_host="127.0.0.1", log_to_driver=False)
    address = f"http://{context.dashboard_url}"
    for each in (signal.SIGTERM, signal.SIGINT):  # after ray.init, which sets its own
        signal.signal(each, note)
    try:
        code = deploy(path, address, ended)
        ended.wait()
        print("Shutting down: running requests may finish; a second signal ends them.", flush=True)
        # Not serve.shutdown at once: it ends the proxies, and every stream is cut.
        client = ServeSubmissionClient(address)
        client.deploy_applications({"http_options": config.get("http_options", {}), "applications": []})
        while num_signals < 2 and client.get_serve_details()["applications"]:
            time.sleep(0.25)
        return code
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(path: Path, address: str, ended: threading.Event | None = None) -> int:
    """Hand the YAML to Ray and wait until what it says is running; returns the exit code."""
    command = [sys.executable, "-m", "ray.serve.scripts", "deploy", "-a", address, str(path)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartError(f"Ray refuses {path}: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    client = ServeSubmissionClient(address)
    due = time.monotonic() + _DEPLOY_LIMIT_S
    while time.monotonic() < due:
        if ended is not None and ended.is_set():
            return 0
        applications = client.get_serve_details()["applications"].values()
        for each in applications:
            if each["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise StartError(f"{each['name']}: {why_failed(each)}")
        if (
            applications
            and all(
                deployment["status"] == "HEALTHY"
                for each in applications
                for deployment in each["deployments"].values()
            )
            and all(each["status"] == "RUNNING" for each in applications)
        ):
            print(f"{path}: running; `serve status` says more, {address} shows it", flush=True)
            return 0
        time.sleep(0.25)
    raise StartError(f"{path} was not running within {_DEPLOY_LIMIT_S:g} s")


def why_failed(application: dict[str, Any]) -> str:
    """The last line of the reason that Ray has, which is the error's own."""
    messages = [each["message"] for each in application["deployments"].values() if each["message"]]
    lines = [line.strip() for text in (application["message"], *messages) for line in text.splitlines() if line.strip()]
    ours = [line.partition("Error: ")[2] for line in lines if line.startswith("server.errors.")]
    return ours[-1] if ours else lines[-1] if lines else "no reason"


if __name__ == "__main__":
    sys.exit(main())
