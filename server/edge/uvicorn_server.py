"""uvicorn as Hallmark runs it, with a shutdown that ends streams properly."""

import asyncio
import errno
import gc
import logging
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from server.edge.connection import LimitedProtocol
from server.edge.lifecycle import Lifecycle
from server.edge.tls import Tls

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 75  # longer than the idle timeout of common proxies (60 s), or they reuse what we have closed
DESCRIPTORS_LOGGED_EVERY_S = 60.0
ABORT_TIME_S = 2.0  # for the last error events to leave, after the grace has ended


class Server(uvicorn.Server):
    """A server that drains on SIGTERM or SIGINT: unready at once, then running requests finish or get an error.

    A second signal is that deadline, a third ends everything at once and in disorder. Signals within `one_order_s` are
    one order: timeout(1), and others that signal a process and then its group, send two.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        lifecycle: Lifecycle,
        grace_s: float,
        *,
        one_order_s: float = 0.5,
        must_end: Callable[[], bool] = lambda: False,
        on_hangup: Callable[[], object] | None = None,
    ) -> None:
        """`must_end` is asked every 0.1 s; True ends the server at once, requests that still run with an error.

        on_hangup  called on SIGHUP, on the event loop; without it SIGHUP ends the process
        """
        super().__init__(config)
        self._lifecycle = lifecycle
        self._grace_s = grace_s
        self._one_order_s = one_order_s
        self._must_end = must_end
        self._on_hangup = on_hangup
        self._num_orders = 0
        self._ordered_at = -math.inf  # monotonic seconds of the latest order's first signal
        self._drain_began_at: float | None = None
        self._descriptors_logged_at = -math.inf

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._on_hangup is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # of what lives as long as the server: to look at it again stopped every stream for 50 ms

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 -- a signal handler's signature
        now = time.monotonic()
        if now - self._ordered_at >= self._one_order_s:
            self._num_orders, self._ordered_at = self._num_orders + 1, now
        if self._num_orders == 2:
            self._grace_s = 0.0
        elif self._num_orders > 2:
            self.should_exit = self.force_exit = True
        self._lifecycle.begin_drain()

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls this every 0.1 s; True ends the server."""
        if self._must_end():
            self._lifecycle.begin_drain()
            self._lifecycle.abort_arriving()
            self._lifecycle.abort_all()
            self.should_exit = True
            return await super().on_tick(counter)
        self._watch_descriptors(time.monotonic())
        if self._lifecycle.is_draining and self._has_drained():
            self.should_exit = True
        return await super().on_tick(counter)

    def _watch_descriptors(self, now: float) -> None:
        """Log, once a minute, that the process can open no file: uvloop then closes new connections in silence."""
        if now - self._descriptors_logged_at < DESCRIPTORS_LOGGED_EVERY_S:
            return
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return
            self._descriptors_logged_at = now
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            logger.error(
                "no file descriptor is left, the limit is %d: new connections are closed without an answer until one "
                "is free; raise the limit (ulimit -n) or have fewer clients",
                limit,
            )

    def _has_drained(self) -> bool:
        now = time.monotonic()
        if self._drain_began_at is None:
            self._drain_began_at = now
            if count := self._lifecycle.num_inflight:
                logger.info(
                    "shutting down; %d running requests have %g s or until a second signal", count, self._grace_s
                )
            else:
                logger.info("shutting down")
        if not self._lifecycle.num_inflight:
            self._lifecycle.abort_arriving()
            return True
        late_s = now - self._drain_began_at - self._grace_s
        if late_s >= 0:
            self._lifecycle.abort_all()
        return late_s > ABORT_TIME_S


def uvicorn_config(app: ASGIApp, tls: Tls | None = None, **settings: Any) -> uvicorn.Config:
    """uvicorn as Hallmark runs it."""
    if tls is not None:
        settings["ssl_context_factory"] = lambda *_: tls.context
    return uvicorn.Config(
        app,
        http=LimitedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # the guard logs requests, without their query strings
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        **settings,
    )
