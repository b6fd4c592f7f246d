"""The operators' endpoints, their switch and their port."""

import re
import time
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from server.cli.main import bind, serve_admin, url_of
from server.edge.keys import ApiKeys, Keys
from server.http.app import create_admin_app
from server.http.operations.attention import named_pairs
from server.protocol.messages import AttestationReport, AttestedBatch, DispatchCount, Heartbeat, PlanRow, ShadowReport
from server.supervisor.client import EngineState
from support.api.edge_fakes import READY, REFUSED, Served, plan_row, served


def test_a_ready_server_is_alive_and_ready(folder: Path) -> None:
    it = served(folder)
    for path in ("/livez", "/readyz", "/health"):
        answer = it.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


STARTING = {"state": EngineState.STARTING, "ready": None}
NO_PATH = "The engine refuses to serve: 1 of 2 shapes has no proven path"
TOO_WIDE = "no path may serve prefill fp32 h4:2 d320: sdpa.cpu: takes at most 256, the shape has 320"
LOST = plan_row(path=None, rejected={"torch.attention.tiles": [("quarantined", "broke in service")]})
ELSEWHERE = plan_row(path=None, rejected={"a": [("arch", "runs on cuda")], "b": [("layout", "does not serve prefill")]})


def refused(*plan: PlanRow) -> dict[str, object]:
    found = msgspec.structs.replace(REFUSED, plan=[*plan] or REFUSED.plan)
    return {"state": EngineState.REFUSED, "ready": None, "refused": found}


@pytest.mark.parametrize(
    ("engine", "is_alive", "reasons"),
    [
        (STARTING, True, [r"The engine is starting\."]),
        (refused(), True, [NO_PATH, TOO_WIDE]),
        (refused(ELSEWHERE), True, [NO_PATH, ".*: a: runs on cuda; b: does not serve prefill"]),
        ({"ready": msgspec.structs.replace(READY, plan=[LOST])}, True,
            [f"no path may serve {LOST.shape}: torch.attention.tiles: broke in service"]),
        ({"state": EngineState.RESTARTING, "ready": None, "silent_s": 300}, True, [r"The engine is restarting\."]),
        ({"silent_s": 31}, False, [".*the limit is 30 s.*"]),
        ({"silent_s": 6}, True, [".*s old, the limit is 5 s"]),
        ({"silent_s": 4}, True, []),
        ({"silent_s": 6, "ready": msgspec.structs.replace(READY, longest_silence_s=9)}, True, []),
    ],
)  # fmt: skip
def test_probes_tell_an_engine_that_is_not_ready_with_the_reasons(
    folder: Path, engine: dict[str, Any], is_alive: bool, reasons: list[str]
) -> None:
    it = served(folder)
    for name, value in engine.items():
        if name == "silent_s":
            it.engine.last_heartbeat = Heartbeat(1, time.monotonic() - value, 0, 0)
        else:
            setattr(it.engine, name, value)
    alive = it.get("/livez")
    assert alive.status_code == (200 if is_alive else 503)
    for answer in (it.get("/readyz"), it.get("/health"), *([] if is_alive else [alive])):
        assert answer.status_code == (503 if reasons else 200)
        found = answer.json().get("reasons", [])
        assert len(found) == len(reasons)
        assert all(re.fullmatch(wanted, it) for wanted, it in zip(reasons, found, strict=True)), found
        assert ("retry-after" in answer.headers) == bool(reasons)


def test_a_draining_server_is_not_ready(folder: Path) -> None:
    it = served(folder)
    it.services.lifecycle.begin_drain()
    assert it.get("/livez").status_code == 200
    assert it.get("/readyz").json()["reasons"] == ["the server is shutting down"]


def test_the_plan_shows_rejections_evidence_and_launches(folder: Path) -> None:
    it = served(folder)
    dispatch = DispatchCount("prefill", "le_128", "sdpa.math", "provisional", "sdpa.cpu", [], 1, 100, 8)
    it.services.telemetry.metrics.operators.served([dispatch])
    body = it.get("/plan").json()
    assert it.get("/attention").json() == body  # the older name
    prefill, decode = body["shapes"]
    assert body["num_fallbacks"] == 1
    assert body["matrix"] == {"digest": "abc123", "verdict": "valid"}
    assert body["fingerprint"]["torch"] == "2.13.0"
    assert body["launches"]["sdpa.math"] == 8
    assert body["on_unproven"] == "qualify"
    assert body["reproducible"] is False
    assert body["layers"]["status"] == "not checked"
    assert (prefill["path"], prefill["wanted"], prefill["fallback_reasons"]) == ("sdpa.math", "sdpa.cpu", ["head_dim"])
    assert prefill["is_fallback"] is True
    assert prefill["rejected"]["sdpa.cpu"] == [{"code": "head_dim", "detail": "takes at most 256, the shape has 320"}]
    assert prefill["evidence"] == {"p50_us": 12.5, "worst": None}  # JSON has no infinity
    assert (decode["is_fallback"], decode["status"]) == (False, "proven")


def test_the_plan_of_a_refused_start_is_shown_too(folder: Path) -> None:
    it = served(folder)
    it.engine.refuse()
    body = it.get("/attention").json()
    assert body["state"] == "refused"
    assert body["shapes"][0]["path"] is None


def test_a_path_of_another_operator_loses_its_own_shapes(folder: Path) -> None:
    it = served(folder)
    row = msgspec.structs.replace(
        plan_row(), shape="experts ...", phase="experts", head_dim=None, path="triton.experts"
    )
    it.engine.ready = msgspec.structs.replace(READY, plan=[*READY.plan, row])
    assert named_pairs("triton.experts", None, it.engine.ready) == [("triton.experts", "experts ...")]
    answer = it.post("/attention/quarantine", {"path": "sdpa.math", "shape": "experts ..."})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "sdpa.math is of another operator than the shape experts ...."


def test_an_engine_before_its_start_has_no_plan_or_orders(folder: Path) -> None:
    it = served(folder)
    it.engine.state, it.engine.ready = EngineState.STARTING, None
    it.engine.report = AttestationReport("request", "match", 1.0, 0.1, [], [])  # which nobody may ask for yet
    orders = (("/attention/attest", {}), ("/attention/quarantine", {"path": "sdpa.cpu"}))
    for answer in (it.get("/attention"), *(it.post(*order) for order in orders)):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")


def test_metrics_are_plain_unless_openmetrics_is_asked_for(folder: Path) -> None:
    it = served(folder)
    plain = it.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    open_metrics = it.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"})
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in text_string_to_metric_families(open_metrics.text)}
    assert "hallmark_attention_fallback" in names


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=abc", "text/plain; version=x;;=", ",;=", ""])
def test_a_malformed_accept_header_does_not_break_the_scrape(folder: Path, accept: str) -> None:
    assert served(folder).get("/metrics", headers={"accept": accept}).status_code == 200


def test_the_version_names_the_machine(folder: Path) -> None:
    found = served(folder).get("/version").json()
    assert (found["version"], found["fingerprint"]) == ("1.2.3", READY.fingerprint)


def test_with_an_admin_port_metrics_are_only_there(folder: Path) -> None:
    it = served(folder, admin_port=9000)
    assert it.get("/metrics").status_code == 404
    assert it.get("/readyz").status_code == 200
    it.app = create_admin_app(it.services)
    for path in ("/metrics", "/attention", "/version", "/livez", "/readyz"):
        assert it.get(path).status_code == 200
    assert it.post("/v1/completions", {"prompt": "a"}).status_code == 404


def test_an_attestation_is_answered_with_its_report(folder: Path) -> None:
    it = served(folder)
    batch = AttestedBatch("prefill", ["sdpa.cpu"], False, {"aten::bmm": 8}, "mismatch", "sdpa.cpu did not launch x")
    it.engine.report = AttestationReport("request", "mismatch", 1.0, 0.1, [batch], [("sdpa.cpu", "prefill fp32")])
    answer = it.post("/attention/attest", {})
    assert answer.status_code == 200
    assert answer.json()["result"] == "mismatch"
    assert answer.json()["batches"][0]["detail"] == "sdpa.cpu did not launch x"
    assert it.get("/attention").json()["attestation"] == answer.json()


def test_the_latest_shadow_checks_are_shown(folder: Path) -> None:
    it = served(folder)
    assert it.get("/attention").json()["shadow_checks"] == []
    it.services.telemetry.metrics.on_shadow(
        ShadowReport("mismatch", 1.5, "decode", "sdpa.cpu", 3, 5, 70, 1, 41.0, "off by 0.1", 0.002, [("sdpa.cpu", "s")])
    )
    (shown,) = it.get("/attention").json()["shadow_checks"]
    assert (shown["result"], shown["factor"], shown["detail"]) == ("mismatch", 41.0, "off by 0.1")
    assert shown["quarantined"] == [["sdpa.cpu", "s"]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"path": "sdpa.cpu"}, "There is no field 'path' here"),
        ({"shapes": [], "path": ""}, "There is no field 'shapes' here"),
        (["sdpa.cpu"], "The body must be an object"),
    ],
)
def test_an_attestation_of_a_part_is_refused_by_name(folder: Path, body: object, said: str) -> None:
    it = served(folder)
    it.engine.report = AttestationReport("request", "match", 1.0, 0.1, [], [])
    answer = it.post("/attention/attest", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)
    assert it.get("/attention").json()["attestation"] is None


@pytest.mark.parametrize("path", ["/attention/attest", "/attention/quarantine"])
def test_a_field_that_no_text_can_carry_is_refused_by_name(folder: Path, path: str) -> None:
    headers = {"content-type": "application/json"}
    answer = served(folder).request("POST", path, content=rb'{"\ud800": 0}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "\\ud800")


SHAPES = [row.shape for row in READY.plan]


def lift(it: Served, body: object) -> httpx2.Response:
    return it.request("DELETE", "/attention/quarantine", json=body)


def test_a_path_is_taken_out_for_all_shapes_of_the_plan(folder: Path) -> None:
    it = served(folder)
    answer = it.post("/attention/quarantine", {"path": "sdpa.cpu"})
    wanted = [{"path": "sdpa.cpu", "shape": shape} for shape in SHAPES]
    assert (answer.status_code, answer.json()["overridden"]) == (200, wanted)
    assert it.get("/attention").json()["overridden"] == wanted


def test_a_path_is_taken_out_for_one_shape_and_lifted_again(folder: Path) -> None:
    it = served(folder)
    order = {"path": "sdpa.cpu", "shape": SHAPES[0]}
    assert it.post("/attention/quarantine", order).json()["overridden"] == [order]
    assert lift(it, {"path": "sdpa.cpu"}).json()["overridden"] == []


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"path": "sdpa.gpu"}, 404, "known are: sdpa.cpu, sdpa.math, triton.prefill"),
        ({"path": "sdpa.cpu", "shape": "prefill"}, 404, f"GET /plan has its {len(SHAPES)} shapes."),
        ({"path": "sdpa.cpu", "shape": SHAPES[1][:-1]}, 404, f"did you mean {SHAPES[1]!r}?"),
        ({"path": 7}, 400, "path must be"),
        ({}, 400, "path must be"),
        ({"path": "sdpa.cpu", "shape": 7}, 400, "shape must be"),
        ({"path": "sdpa.cpu", "shapes": []}, 400, "'shapes'"),
    ],
)
def test_an_order_that_names_nothing_is_refused(folder: Path, body: dict[str, object], status: int, word: str) -> None:
    it = served(folder)
    for answer in (it.post("/attention/quarantine", body), lift(it, body)):
        assert answer.status_code == status
        assert word in answer.json()["error"]["message"]
    assert it.engine.quarantine.by_operator == []


def test_an_order_that_leaves_no_path_is_a_conflict(folder: Path) -> None:
    it = served(folder)
    it.engine.stranded = [*reversed(SHAPES)]
    answer = it.post("/attention/quarantine", {"path": "sdpa.cpu"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    assert f"{min(SHAPES)} and {len(SHAPES) - 1} more shapes" in answer.json()["error"]["message"]


def test_an_order_is_counted_and_a_wrong_method_refused(folder: Path) -> None:
    it = served(folder)
    it.post("/attention/quarantine", {"path": "sdpa.cpu"})
    assert it.value("requests_total", route="/attention/quarantine", outcome="ok") == 1
    assert it.get("/attention/quarantine").headers["allow"] == "DELETE, POST"


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
