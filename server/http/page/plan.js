"use strict";
/* The plan and the attestation, from GET /attention. */
let shapes = [];

async function refreshPlan() {
  const {status, body, message} = await get("attention", keys.operator);
  const has = status === 200;
  $("plan-body").hidden = !has;
  $("plan-note").hidden = has;
  $("figures-note").hidden = has;
  if (!has) {
    const why = status === 401 ? needsKey("Plan and figures need an operator's key", keys.operator, message)
      : status === 404 ? message + " Open that port in a browser for the plan and the figures." : message;
    if (status >= 401 && status <= 404) { refused = why; isKeyNeeded ||= status === 401; $("figures-body").hidden = true; }
    $("plan-note").textContent = $("figures-note").textContent = why;
    return;
  }
  shapes = body.shapes;
  if (model === null) { model = body.model; $("model").textContent = model; }
  const counts = new Map(), hasMatrix = Boolean(body.matrix && body.matrix.digest);
  for (const it of shapes) counts.set(it.status, (counts.get(it.status) || 0) + 1);
  $("plan-summary").replaceChildren(
    make("span", {}, shapes.length + " shapes:"), ...[...counts].map(([status, count]) => chip(count + " " + status, "", status)),
    chip(body.num_fallbacks + (body.num_fallbacks === 1 ? " fallback" : " fallbacks"), body.num_fallbacks ? "warn" : "good", "fallback"),
    make("span", {class: "note small", ...titled(hasMatrix ? "matrix" : "matrix none")}, "matrix " + (hasMatrix ? body.matrix.digest : "none") + ", on unproven: " + body.on_unproven));
  showShapes();
  showAttestation(body);
  const machine = body.fingerprint || {};
  const device = machine.gpu || machine.device || machine.cpu;
  $("version").textContent = [device, machine.torch && "torch " + machine.torch, machine.triton && "triton " + machine.triton].filter(Boolean).join(", ");
}
function showShapes() {
  const chosen = shapes.filter(it => !$("only-fallbacks").checked || it.is_fallback || it.status !== "proven");
  $("shapes").replaceChildren(...chosen.map(it => {
    const why = Object.entries(it.rejected).filter(([, reasons]) => reasons.length);
    const list = why.length ? make("details", {}, make("summary", {}, why.length + " paths"),
      ...why.map(([path, reasons]) => make("div", {class: "note"}, path + ": " + reasons.map(reason => reason.detail || reason.code).join("; ")))) : "";
    const p50 = it.evidence && typeof it.evidence.p50_us === "number" ? duration(it.evidence.p50_us) : "–";
    return make("tr", it.is_fallback ? {class: "fallback"} : {}, cell(it.phase), bucketCell(it.query_bucket), bucketCell(it.context_bucket),
      cell(it.path || "none"), cell(chip(it.status)), cell(it.is_fallback ? "from " + it.wanted + ": " + it.fallback_reasons.join(", ") : "no"),
      cell(p50, "number"), cell(it.shape, "wrap"), cell(list, "wrap"));
  }));
}
function showAttestation(report) {
  const latest = report.attestation, checks = report.shadow_checks;
  const shown = latest ? [make("div", {class: "row"}, chip(latest.result), make("span", {}, latest.batches.length + " batches, " + new Date(latest.at * 1000).toLocaleString() + ", id " + latest.id))]
    : [make("p", {class: "note"}, "None yet.")];
  const explained = latest ? latest.batches.filter(it => it.explained) : [];
  if (explained.length) shown.push(make("p", {class: "note"}, "Time in kernels that are proven or named: " + explained.map(it => it.phase + " " + (100 * it.explained.share).toFixed(1) + "%").join(", ")));
  for (const batch of explained) {
    const unknown = Object.keys(batch.explained.unexplained);
    if (unknown.length) shown.push(make("p", {class: "note"}, batch.phase + " ran kernels that no list names: " + unknown.join(", ")));
  }
  for (const batch of latest ? latest.batches : []) if (batch.detail) shown.push(make("p", {class: "note"}, batch.phase + ": " + batch.detail));
  if (checks.length) shown.push(make("p", {class: "note"}, "Latest shadow checks: " + checks.filter(it => it.result === "match").length + " of " + checks.length + " match"));
  const shapesOf = new Map();
  for (const {path, shape} of report.overridden) shapesOf.set(path, [...(shapesOf.get(path) || []), shape]);
  for (const [path, found] of shapesOf) shown.push(make("details", {class: "note"},
    make("summary", {}, path + " is quarantined by an operator for " + found.length + (found.length === 1 ? " shape" : " shapes")), ...found.map(it => make("div", {class: "small"}, it))));
  $("attestation").replaceChildren(...shown);
}

