"""The operators' port."""

from pathlib import Path

import httpx2

from server.cli.main import bind, serve_admin, url_of
from server.edge.keys import ApiKeys, Keys
from server.http.app import create_admin_app
from support.api.edge_fakes import served


def test_the_admin_port_answers_from_a_thread_of_its_own(folder: Path) -> None:
    it = served(folder, admin_port=0)
    sock = bind("127.0.0.1", 0, "--admin-port")
    url = url_of(sock)
    server = serve_admin(it.services, sock)
    try:
        with httpx2.Client(transport=httpx2.HTTPTransport(retries=20)) as client:
            assert "hallmark_build_info" in client.get(f"{url}/metrics").text
            assert client.get(f"{url}/attention").json()["model"] == "tiny"
            assert client.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 404
    finally:
        server.should_exit = True


def test_the_admin_port_asks_for_a_known_operators_key(folder: Path) -> None:
    it = served(folder, admin_port=0)
    it.app = create_admin_app(it.services, Keys(ApiKeys(["tenant"]), ApiKeys(["root"])))  # type: ignore[assignment]
    statuses = [
        it.get("/metrics", headers={"authorization": f"Bearer {key}"}).status_code for key in ("root", "tenant")
    ]
    assert statuses == [200, 401]
    assert it.get("/metrics").status_code == 401
    assert it.get("/livez").status_code == 200


def test_the_api_names_the_admin_port_for_its_routes(folder: Path) -> None:
    it = served(folder, admin_port=9000)
    answers = [it.get("/metrics"), it.get("/attention"), it.post("/attention/attest", {})]
    assert [answer.status_code for answer in answers] == [404] * 3
    assert answers[0].json()["error"]["message"] == "'/metrics' is on the server's admin port, 9000."
    assert "admin port" not in it.get("/metric").text
