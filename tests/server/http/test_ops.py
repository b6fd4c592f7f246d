"""The operators' endpoints."""

import time
from pathlib import Path

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from server.http.app import create_admin_app
from server.http.operations.attention import named_pairs
from server.protocol.messages import AttestationReport, AttestedBatch, DispatchCount, Heartbeat, ShadowReport
from server.supervisor.client import EngineState
from support.api.edge_fakes import READY, plan_row, served


def test_a_ready_server_is_alive_and_ready(folder: Path) -> None:
    it = served(folder)
    for path in ("/livez", "/readyz", "/health"):
        answer = it.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_a_starting_server_is_alive_but_not_ready(folder: Path) -> None:
    it = served(folder)
    it.engine.state, it.engine.ready = EngineState.STARTING, None
    assert it.get("/livez").status_code == 200
    answer = it.get("/readyz")
    assert (answer.status_code, answer.json()["reasons"]) == (503, ["The engine is starting."])
    assert "retry-after" in answer.headers


def test_a_refused_start_says_which_shape_and_why(folder: Path) -> None:
    it = served(folder)
    it.engine.refuse()
    assert it.get("/livez").status_code == 200
    first, second = it.get("/health").json()["reasons"]
    assert first == "The engine refuses to serve: 1 of 2 shapes has no proven path"
    assert second == "no path may serve prefill fp32 h4:2 d320: sdpa.cpu: takes at most 256, the shape has 320"


def test_a_shape_that_lost_its_path_in_service_is_unready(folder: Path) -> None:
    it = served(folder)
    row = plan_row(path=None, rejected={"torch.attention.tiles": [("quarantined", "broke in service")]})
    it.engine.ready = msgspec.structs.replace(READY, plan=[row])
    answer = it.get("/readyz")
    assert (answer.status_code, it.get("/livez").status_code) == (503, 200)
    assert answer.json()["reasons"] == [f"no path may serve {row.shape}: torch.attention.tiles: broke in service"]


def test_paths_of_other_machines_or_phases_are_the_reason(folder: Path) -> None:
    it = served(folder)
    it.engine.refuse()
    assert it.engine.refused is not None
    row = plan_row(path=None, rejected={"a": [("arch", "runs on cuda")], "b": [("layout", "does not serve prefill")]})
    it.engine.refused = msgspec.structs.replace(it.engine.refused, plan=[row])
    assert it.get("/readyz").json()["reasons"][1].endswith(": a: runs on cuda; b: does not serve prefill")


def test_an_engine_without_a_heartbeat_is_not_alive(folder: Path) -> None:
    it = served(folder)
    it.engine.last_heartbeat = Heartbeat(1, time.monotonic() - 31, 0, 0)
    for path in ("/livez", "/readyz"):
        answer = it.get(path)
        assert answer.status_code == 503
        assert "the limit is 30 s" in answer.json()["reasons"][0]


@pytest.mark.parametrize(("age_s", "longest_silence_s", "is_ready"), [(4, 0, True), (6, 0, False), (6, 9, True)])
def test_an_engine_silent_for_5_s_is_not_ready(
    folder: Path, age_s: float, longest_silence_s: float, is_ready: bool
) -> None:
    it = served(folder)
    it.engine.last_heartbeat = Heartbeat(1, time.monotonic() - age_s, 0, 0)
    assert it.engine.ready is not None
    it.engine.ready = msgspec.structs.replace(it.engine.ready, longest_silence_s=longest_silence_s)
    answer = it.get("/readyz")
    assert answer.status_code == (200 if is_ready else 503)
    if not is_ready:
        assert answer.json()["reasons"][0].endswith("s old, the limit is 5 s")
    assert it.get("/livez").status_code == 200


def test_a_restarting_engine_does_not_make_the_process_dead(folder: Path) -> None:
    it = served(folder)
    it.engine.state, it.engine.ready = EngineState.RESTARTING, None
    it.engine.last_heartbeat = Heartbeat(1, time.monotonic() - 300, 0, 0)
    assert it.get("/livez").status_code == 200
    assert it.get("/readyz").status_code == 503


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
