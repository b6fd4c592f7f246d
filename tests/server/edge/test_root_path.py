"""A proxy that offers the API under a path, and takes that path away or not."""

from pathlib import Path

import pytest

from server.errors import SettingsError
from support.api.edge_fakes import saying, served, with_keys


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_routes_and_the_document_are_right_under_a_root_path(folder: Path, prefix: str) -> None:
    it = served(folder, saying("Hello"), root_path="/llm")
    assert it.post(f"{prefix}/v1/completions", {"prompt": "a"}).json()["choices"][0]["text"] == "Hello"
    assert it.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert it.get(f"{prefix}/docs").status_code == 200
    missing = it.get(f"{prefix}/v1/nothing").json()["error"]
    assert missing["message"].startswith("There is nothing at '/v1/nothing'")
    assert it.value("requests_total", route="/v1/completions", outcome="ok") == 1


@pytest.mark.parametrize("path", ["/metrics", "/llm/metrics", "/llm/llm/metrics", "/llm//metrics", "//metrics"])
def test_a_root_path_opens_no_operators_route(folder: Path, path: str) -> None:
    it = with_keys(served(folder, root_path="/llm"), "right", operator="root")
    answer = it.get(f"http://localhost{path}", headers={"authorization": "Bearer right"})
    assert answer.status_code in (403, 404)
    assert it.get("/llm/metrics", headers={"authorization": "Bearer root"}).status_code == 200


@pytest.mark.parametrize("path", ["llm", "/llm/", "//", "/a b", "/a?b", "/a//b"])
def test_what_is_no_root_path_stops_the_start(folder: Path, path: str) -> None:
    with pytest.raises(SettingsError, match=f"^--root-path {path}".replace("?", r"\?")):
        _ = served(folder, root_path=path).app
