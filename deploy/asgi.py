"""The API for any ASGI server, in place of `hallmark serve`: settings are HALLMARK_* variables.

    HALLMARK_MODEL=... uvicorn --factory deploy.asgi:create
    HALLMARK_MODEL=... hypercorn 'deploy.asgi:create()'

One worker: each would start an engine of its own. What `hallmark serve` does at the connection (limits on headers, slow
senders and trailers, drain on SIGTERM) is then that server's.
"""

import os

from starlette.types import ASGIApp

from server.cli.main import assemble, resolve
from server.edge.keys import Keys
from server.http.app import create_app
from server.log import configure_logging
from server.settings import read_settings


def create() -> ASGIApp:
    """Return the application; its lifespan starts the engine. Raises StartError where it cannot be built."""
    settings = read_settings({}, os.environ)
    configure_logging(settings.log_format)
    settings, folder = resolve(settings)
    keys = Keys.load(settings)
    return create_app(assemble(settings, folder, keys, "http://HOST:PORT"), keys)
