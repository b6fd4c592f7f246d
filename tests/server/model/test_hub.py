"""A model by its hub id, from a hub on loopback: what is fetched, kept, gone on with and refused."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest

from server.errors import ModelError, SettingsError
from server.model.load.fetch_progress import FetchProgress
from server.model.load.hub import Hub
from server.model.load.source import model_folder
from support.hub_server import COMMIT, HubServer, serving_hub

NAME = "org/tiny"
CONFIG = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}).encode()
PARTS = {f"model-{index}.safetensors": bytes([index]) * 300_000 for index in range(2)}
INDEX = json.dumps({"weight_map": {f"{name}.weight": name for name in PARTS}}).encode()
READ = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model.safetensors.index.json": INDEX,
    **PARTS,
}
NOT_READ = {
    "README.md": b"a card",
    "pytorch_model.bin": b"pickles",
    "consolidated.safetensors": b"twice",
    "model.safetensors": b"an older form",
    "onnx/config.json": b"{}",
}


@contextmanager
def hub_of(tmp_path: Path, files: dict[str, bytes] | None = None) -> Iterator[tuple[HubServer, Hub]]:
    """A hub with one repository, and what a client is to know of it."""
    with serving_hub(HubServer(NAME, READ | NOT_READ if files is None else files)) as server:
        yield server, Hub(server.url, tmp_path / "cache")


def offline(hub: Hub) -> Hub:
    return Hub("http://127.0.0.1:1", hub.cache, is_offline=True)


def read_back(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_what_a_server_reads_is_fetched_and_nothing_else(tmp_path: Path) -> None:
    lines: list[str] = []
    with hub_of(tmp_path) as (server, hub):
        folder = model_folder(NAME, say=lines.append, hub=hub)
        assert read_back(folder) == READ
        assert folder.name == COMMIT
        assert lines[0] == f"fetching: {NAME} at {COMMIT[:12]}, 0.6 MB in 2 files, into {hub.cache}"
        assert lines[-1].startswith("fetching: 0.6 MB of 0.6 MB, in ")
        num_asked = len(server.downloads())
        assert model_folder(NAME, hub=hub) == folder
        assert len(server.downloads()) == num_asked, "what is there is not fetched again"


def test_dummy_weights_fetch_no_weights_and_modules_have_folders(tmp_path: Path) -> None:
    modules = {"modules.json": b"[]", "1_Pooling/config.json": b"{}", "2_Dense/model.safetensors": b"x"}
    with hub_of(tmp_path, READ | modules) as (_, hub):
        found = read_back(model_folder(NAME, has_weights=False, hub=hub))
    assert found.keys() == READ.keys() - PARTS.keys() | {"modules.json", "1_Pooling/config.json"}


@pytest.mark.parametrize("resets", [False, True])
def test_a_broken_download_goes_on(resets: bool, tmp_path: Path) -> None:
    files = READ | {"model-1.safetensors": bytes(range(256)) * 50_000}
    with hub_of(tmp_path, files) as (server, hub):
        server.breaks, server.resets = {"model-1.safetensors": 12_000_000}, resets
        assert read_back(model_folder(NAME, hub=hub)) == files
        begun = [wanted for file, wanted in server.downloads() if file == "model-1.safetensors"]
    # The client goes on from its last whole block; a reset it leaves to us, who begin the file anew.
    assert begun == [None, None if resets else f"bytes={10 * 2**20}-"]


def test_a_signal_ends_a_download_at_once_and_leaves_no_part(tmp_path: Path) -> None:
    code = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs behind it with the signal ignored
from server.model.load.source import model_folder
model_folder({NAME!r}, say=lambda line: print(line, flush=True))
"""
    with hub_of(tmp_path) as (server, hub):
        server.stalls = True
        here = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(hub.cache)}
        command = [sys.executable, "-c", code]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, env=os.environ | here, text=True, **pipes) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("fetching: ")
            while not [*hub.cache.rglob("*.incomplete")]:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=20)
        assert process.returncode == 130
        assert error == f"hallmark: ended while {NAME} was fetched: files that were whole are kept\n"
    assert [*hub.cache.rglob("*.incomplete")] == []


def test_a_pinned_commit_that_is_there_needs_no_hub(tmp_path: Path) -> None:
    with hub_of(tmp_path) as (server, hub):
        folder = model_folder(NAME, "v2", hub=hub)
        server.asked.clear()
        assert model_folder(NAME, COMMIT, hub=hub) == folder
        assert server.asked == []
        with pytest.raises(
            ModelError, match=f"model {NAME}: {hub.endpoint} has no revision v3 of it: --revision takes"
        ):
            model_folder(NAME, "v3", hub=hub)
    with pytest.raises(SettingsError, match=r"--revision v2 is of a hub id, and .* is a folder"):
        model_folder(str(folder), "v2")


def test_a_cache_serves_offline_if_it_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with hub_of(tmp_path) as (server, hub):
        with pytest.raises(ModelError, match=rf"HF_HUB_OFFLINE is set, and {hub.cache} does not have it: fetch it"):
            model_folder(NAME, hub=offline(hub))
        folder = model_folder(NAME, hub=hub)
        assert model_folder(NAME, hub=offline(hub)) == folder
        server.is_down = True
        with caplog.at_level(logging.WARNING):
            assert model_folder(NAME, hub=hub) == folder
        assert f"answers 503: try again later; {COMMIT}, which the cache has, is served" in caplog.text
        for name in ("chat_template.jinja", "model-0.safetensors"):
            (folder / name).unlink()
            with pytest.raises(ModelError, match=rf"HF_HUB_OFFLINE is set, and {folder} lacks {name}"):
                model_folder(NAME, hub=offline(hub))
            server.is_down = False
            assert read_back(model_folder(NAME, hub=hub)) == READ


@pytest.mark.parametrize("status", [HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN])
def test_files_for_some_are_refused_with_where_to_ask(status: HTTPStatus, tmp_path: Path) -> None:
    with hub_of(tmp_path) as (server, hub):
        server.refused = status
        with pytest.raises(ModelError, match=rf"makers let in: ask on {hub.endpoint}/{NAME}, then set HF_TOKEN"):
            model_folder(NAME, hub=hub)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config.json": None}, r"the repository has no config.json \(it has README.md, additional_"),
        (
            {"config.json": None, "params.json": b"{}", "consolidated.safetensors": b""},
            "its files are in Mistral's own format .params.json, no config.json., which is not read: serve the same",
        ),
        (
            {"config.json": b'{"model_type": "qwen9"}'},
            r"config.json: model_type 'qwen9' is not supported; nearest: qwen",
        ),
        ({"config.json": b"[]"}, "config.json: must hold a JSON object"),
        ({"config.json": None, "adapter_config.json": b"{}"}, r"holds an adapter \(LoRA\)"),
        (
            {"model.safetensors.index.json": None, "model.safetensors": None},
            r"has no model.safetensors \(it has .* and \d more\): only safetensors",
        ),
        ({"model-1.safetensors": None}, "the repository has no model-1.safetensors"),
    ],
)
def test_what_cannot_be_served_is_refused_before_its_weights(
    changes: dict[str, bytes | None], message: str, tmp_path: Path
) -> None:
    files = {name: data for name, data in (READ | NOT_READ | changes).items() if data is not None}
    with hub_of(tmp_path, files) as (server, hub):
        with pytest.raises(ModelError, match=message) as caught:
            model_folder(NAME, hub=hub)
        assert str(caught.value).startswith("model ") or str(caught.value).startswith(str(hub.cache))
        assert "\n" not in str(caught.value)
        assert not any(file.endswith(".safetensors") for file, _ in server.downloads())


def test_no_such_model_and_no_hub_are_told_apart(tmp_path: Path) -> None:
    missing = "org/tny: no such folder, and http://.* has no such model: is it spelt right"
    with hub_of(tmp_path) as (_, hub), pytest.raises(ModelError, match=missing):
        model_folder("org/tny", hub=hub)
    nobody = Hub("http://127.0.0.1:1", hub.cache)
    with pytest.raises(ModelError, match=rf"model {NAME}: {nobody.endpoint} cannot be reached: .*Connection refused"):
        model_folder(NAME, hub=nobody)
    for name in ("a/b/c", "org/na me"):
        with pytest.raises(ModelError, match="neither a folder nor a hub id"):
            model_folder(name, hub=hub)
    for name in ("/no/such/folder", "./no-such-folder"):
        with pytest.raises(ModelError, match="no such folder"):
            model_folder(name)


def test_a_full_or_forbidden_cache_is_named(tmp_path: Path) -> None:
    with hub_of(tmp_path) as (server, hub):
        full = Hub(hub.endpoint, hub.cache, free_bytes=lambda _: 100_000)
        with pytest.raises(ModelError, match=rf"its weights are 0.6 MB, and {hub.cache} has 0.1 MB left: make room"):
            model_folder(NAME, hub=full)
        assert not any(file.endswith(".safetensors") for file, _ in server.downloads())
        (tmp_path / "file").write_text("x")
        nowhere = Hub(hub.endpoint, tmp_path / "file" / "cache")
        with pytest.raises(ModelError, match=rf"{nowhere.cache}.* cannot be written: Not a directory: HF_HUB_CACHE"):
            model_folder(NAME, hub=nowhere)


def test_progress_is_a_line_every_few_seconds() -> None:
    seconds = iter([0.0, 0.0, 1.0, 6.0, 6.0, 7.0, 20.0])
    lines: list[str] = []
    progress = FetchProgress(4_000_000_000, lines.append, clock=lambda: next(seconds))
    for done in (500_000_000, 1_000_000_000, 1_100_000_000, 4_000_000_000):
        progress(done)
    assert lines == [
        "fetching: 1.0 GB of 4.0 GB, about 18 s left",
        "fetching: 4.0 GB of 4.0 GB, in 20 s",
    ]
