"""Hallmark as an application of Ray Serve: `import_path: deploy.ray.app:build` in the YAML."""

import os
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from starlette.types import ASGIApp

from deploy.ray.arguments import read_arguments
from deploy.ray.replica import Health, Replica
from deploy.ray.router import AffinityRouter
from server.cli.main import assemble, bind, resolve, serve_admin
from server.edge.keys import Keys
from server.http.app import create_app
from server.log import configure_logging


@serve.deployment(name="hallmark")
@serve.ingress()  # without an application: it is built in the replica, and nothing of it is pickled
class Hallmark:
    """One replica: an engine process, and the whole API in front of it."""

    def __init__(self, args: dict[str, Any]) -> None:
        self._arguments, settings = read_arguments(args, os.environ)
        configure_logging(settings.log_format)
        self._settings, self._folder = resolve(settings)
        self._health: Health | None = None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        settings, keys = self._settings, Keys.load(self._settings)
        services = assemble(settings, self._folder, keys, "Ray Serve")
        if settings.admin_port is not None:
            serve_admin(services, bind(settings.host, settings.admin_port, "--admin-port"), keys)
        self._health = Health(services, replace_after_s=self._arguments.replace_after_s)
        name = serve.get_replica_context().replica_tag
        return Replica(create_app(services, keys), services, name=name, hold_s=self._arguments.hold_s)

    async def check_health(self) -> None:
        """Ray asks every few seconds, and replaces a replica that raises three times in a row."""
        if self._health is not None:
            self._health.check()


def build(args: dict[str, Any]) -> Application:
    """The application of the YAML's `args`. Raises SettingsError for what is wrong in them."""
    arguments, _ = read_arguments(args, os.environ)
    router = RequestRouterConfig(
        request_router_class=AffinityRouter, request_router_kwargs={"max_excess": arguments.max_excess}
    )
    return Hallmark.options(request_router_config=router).bind(args)
