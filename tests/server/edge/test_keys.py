"""Files of keys, as the server reads them at its start."""

import logging
from pathlib import Path

import pytest

from server.edge.keys import ApiKeys, Keys
from server.errors import SettingsError
from server.log import LineFormatter
from server.settings import Settings
from support.api.edge_fakes import Served, saying, served


def files(folder: Path, **keys: str) -> dict[str, str]:
    """Settings that name files with these keys."""
    for name, text in keys.items():
        (folder / name).write_text(text)
    return {name: str(folder / name) for name in keys}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"api_key_file": "a\nboth\n", "operator_key_file": "both\nb\n"},
            "--operator-key-file .*: holds a key of --api-key-file"),
        ({"operator_key_file": "# none\n"}, "^--operator-key-file .*: holds no key"),
        ({"api_key_file": "alice:same\nbob:same\n"}, "holds one key under two names, alice and bob"),
    ],
)  # fmt: skip
def test_files_of_keys_that_contradict_stop_the_start(tmp_path: Path, keys: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Keys.load(Settings(**files(tmp_path, **keys)))  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [{}, {"operator_key_file": "b"}, {"admin_port": 0}], ids=["neither", "file", "port"])
def test_closed_operators_routes_are_logged_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: dict[str, object]
) -> None:
    named = files(
        tmp_path, **{"api_key_file": "a"} | {name: str(text) for name, text in more.items() if "file" in name}
    )
    ports = {name: value for name, value in more.items() if "port" in name}
    with caplog.at_level(logging.WARNING):
        Keys.load(Settings(**named, **ports))  # type: ignore[arg-type]
    assert any("--operator-key-file" in record.getMessage() for record in caplog.records) == (not more)


def read(folder: Path, api_keys: str, operators: str | None = None) -> tuple[Keys, Settings]:
    named = files(folder, api_key_file=api_keys) | (files(folder, operator_key_file=operators) if operators else {})
    settings = Settings(**named)  # type: ignore[arg-type]
    return Keys.load(settings), settings


def key(text: str) -> dict[str, str]:
    return {"authorization": f"Bearer {text}"}


def test_a_keys_name_is_in_the_log_and_in_the_metrics(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, _ = read(tmp_path, "alice:secret-a\nsecret-b\n", "ops:secret-o\n")
    base = served(folder, saying("Hello"))
    it = Served(base.services, base.engine, keys)
    with caplog.at_level(logging.INFO):
        for secret in ("secret-a", "secret-a", "secret-b", "secret-o", "wrong"):
            it.post("/v1/completions", {"prompt": "four"}, headers=key(secret))
    lines = [LineFormatter().format(record) for record in caplog.records if record.name == "server.edge.guard"]
    assert [line.partition("key=")[2].split()[:1] for line in lines] == [["alice"], ["alice"], ["unnamed"], ["ops"], []]
    assert not any("secret" in line for line in lines)
    assert [it.value("key_requests_total", key=name) for name in ("alice", "unnamed", "ops")] == [2, 1, 1]
    assert it.value("key_tokens_total", key="alice") == 2 * (4 + 6)


def test_only_twenty_names_have_a_label_of_their_own(folder: Path) -> None:
    it = served(folder)
    traffic = it.services.telemetry.metrics.traffic
    traffic.create_keys(f"key-{i}" for i in range(25))
    for i in range(25):
        traffic.used(f"key-{i}", 10)
    assert it.value("key_tokens_total", key="key-19") == 10
    assert it.value("key_tokens_total", key="key-20") is None
    assert it.value("key_tokens_total", key="other") == 50


@pytest.mark.parametrize("line", ["two words:key", "name:", ":key", "n" * 65 + ":key"])
def test_a_line_without_name_and_key_is_refused_by_number(tmp_path: Path, line: str) -> None:
    with pytest.raises(SettingsError, match=r"--api-key-file .*: line 3: expected `key` or `name:key`") as refused:
        read(tmp_path, f"# comment\n\n{line}\n")
    assert "key" not in refused.value.message.rpartition("line 3")[2].replace("`key`", "").replace("`name:key`", "")


def test_a_name_may_have_several_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:same\nalice:same\nalice:next\n")
    assert ApiKeys.load(file).names == ("alice",)


def test_keys_are_read_again_and_a_bad_file_keeps_the_old_ones(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, settings = read(tmp_path, "a:first\n", "ops:root\n")
    base = served(folder)
    it = Served(base.services, base.engine, keys)
    files(tmp_path, api_key_file="b:second\n", operator_key_file="ops:root2\n")
    with caplog.at_level(logging.INFO):
        assert keys.reload(settings)
        assert it.get("/metrics", headers=key("root2")).status_code == 200
        statuses = [it.get("/v1/models", headers=key(text)).status_code for text in ("first", "second", "root")]
        assert statuses == [401, 200, 401]
        for bad in ("", "root2\n", "no name:x\n"):
            caplog.clear()
            files(tmp_path, api_key_file=bad)
            assert not keys.reload(settings)
            [line] = [record.getMessage() for record in caplog.records if record.name == "server.edge.keys"]
            assert line.startswith("SIGHUP: the keys stay as they were: ")
    assert it.get("/v1/models", headers=key("second")).status_code == 200
