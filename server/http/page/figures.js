"use strict";
/* Figures, from the text of GET /metrics. */
const KEPT_S = 330, KEPT_POINTS = 60;
let snapshots = [], points = {};

function parse(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    const found = /^hallmark_(\w+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value.replace(/\\(.)/g, "$1");
    if (!families.has(found[1])) families.set(found[1], []);
    families.get(found[1]).push({labels, value: Number(found[3])});
  }
  return families;
}
const samples = (families, name) => families.get(name) || [];
const sum = (families, name, isWanted = () => true) => samples(families, name).filter(it => isWanted(it.labels)).reduce((total, it) => total + it.value, 0);

async function refreshFigures() {
  const {status, body} = await get("metrics", keys.operator, true);
  if (status !== 200) { $("figures-body").hidden = true; return; }
  const now = performance.now() / 1000, families = parse(body);
  snapshots.push({at: now, families});
  snapshots = snapshots.filter(it => now - it.at < KEPT_S);
  $("figures-body").hidden = false;
  showTiles(families);
  showTtft();
  noteTtft(now);
  showLaunches(families);
  showFallbacks(families);
}
function showTiles(families) {
  const before = snapshots[Math.max(0, snapshots.length - 4)], span = snapshots.at(-1).at - before.at;
  const rate = name => span ? Math.max(0, sum(families, name) - sum(before.families, name)) / span : null;
  const used = sum(families, "kv_cache_usage_ratio");
  const served = sum(families, "requests_total", it => it.outcome === "ok" && it.route.startsWith("/v1/") && !it.route.startsWith("/v1/models"));
  const tiles = [
    ["tokens a second", rate("generation_tokens_total"), it => it.toFixed(it < 10 ? 1 : 0)],
    ["running", sum(families, "requests_running")], ["waiting", sum(families, "requests_waiting")],
    ["KV cache", used, it => (100 * it).toFixed(1) + " %", 1],
    ["answers", served], ["engine restarts", sum(families, "engine_restarts_total")],
  ];
  $("tiles").replaceChildren(...tiles.map(([name, value, format = String, top], i) => {
    const history = points[name] ||= [];
    if (value !== null) history.push(value);
    if (history.length > KEPT_POINTS) history.shift();
    return make("div", {class: "tile"}, make("span", {}, name), make("b", {}, value === null ? "–" : format(value)), i < 4 ? line(history, top) : null);
  }));
}
function line(values, top) {
  const most = top || Math.max(...values, 1e-9), svg = draw("svg", {viewBox: "0 0 60 22", preserveAspectRatio: "none", "aria-hidden": "true"});
  svg.append(draw("polyline", {points: values.map((value, i) => (60 - values.length + i + 1) + "," + (21 - 20 * value / most)).join(" ")}));
  return svg;
}
/* Cumulative counts by upper edge, of what came in the last `window_s`; 0: since the start. */
function histogram(name, bucket, window_s) {
  const newest = snapshots.at(-1);
  const oldest = window_s ? snapshots.find(it => newest.at - it.at <= window_s) : null;
  const read = families => new Map(samples(families, name + "_bucket").filter(it => it.labels.bucket === bucket).map(it => [it.labels.le, it.value]));
  const after = read(newest.families), before = oldest ? read(oldest.families) : new Map();
  return [...after].map(([edge, count]) => [edge === "+Inf" ? Infinity : Number(edge), Math.max(0, count - (before.get(edge) || 0))]).sort((a, b) => a[0] - b[0]);
}
/* As Prometheus' histogram_quantile: linear within a step; the last finite edge where it lies above all of them. */
function quantile(steps, q) {
  const total = steps.length ? steps.at(-1)[1] : 0;
  if (!total) return null;
  let low = 0, below = 0;
  for (const [edge, count] of steps) {
    if (count >= q * total) return edge === Infinity ? low : low + (edge - low) * (q * total - below) / (count - below || 1);
    [low, below] = [edge, count];
  }
  return low;
}
const duration = us => us < 1000 ? us.toPrecision(3) + " µs" : seconds(us / 1e6);
const seconds = it => it === null ? "–" : it < 1 ? (1000 * it).toPrecision(3) + " ms" : it.toPrecision(3) + " s";
function showTtft() {
  if (!snapshots.length) return;
  const families = snapshots.at(-1).families, objectives = samples(families, "slo_objective_seconds").filter(it => it.labels.sli === "ttft");
  const buckets = samples(families, "time_to_first_token_seconds_count").map(it => it.labels.bucket);
  $("ttft").replaceChildren(...buckets.map(bucket => {
    const steps = histogram("time_to_first_token_seconds", bucket, Number($("window").value)), p99 = quantile(steps, 0.99);
    const objective = objectives.find(it => it.labels.bucket === bucket);
    const isLate = objective && p99 !== null && p99 > objective.value;
    return make("tr", {}, bucketCell(bucket), cell(steps.length ? steps.at(-1)[1] : 0, "number"), cell(seconds(quantile(steps, 0.5)), "number"),
      cell(isLate ? chip(seconds(p99), "warn") : seconds(p99), "number"), cell(objective ? seconds(objective.value) : "–", "number"));
  }));
}
function showLaunches(families) {
  const found = samples(families, "attention_launches_total").sort((a, b) => b.value - a.value), most = found.length ? found[0].value : 0;
  const shown = found.filter(it => it.value > 0);
  $("launches").replaceChildren(...(shown.length ? shown : found).slice(0, 12).map(it => make("tr", {}, cell(it.labels.path),
    cell(it.value.toLocaleString("en"), "number"), cell(make("progress", {max: Math.max(1, most), value: it.value, "aria-label": "launches of " + it.labels.path})))));
}
function showFallbacks(families) {
  const found = samples(families, "attention_fallback_total").filter(it => it.value > 0).sort((a, b) => b.value - a.value);
  $("fallbacks").replaceChildren(...(found.length ? found.map(({labels: it, value}) => make("div", {class: "row"}, chip(value.toLocaleString("en") + (value === 1 ? " step" : " steps"), "warn"),
    make("span", {}, it.phase + " on " + it.to + " instead of " + it.from + ": " + it.reason))) : [chip("none", "good")]));
}


/* --- the time to the first token over time: at each point the quantile of the minute before it --- */
const CHART_S = 1800, CHART_WINDOW_S = 60, CHART_HEIGHT = 170, SVG = "http://www.w3.org/2000/svg";
let moments = []; // {at, quantiles: {bucket: [p50, p99]}}

function draw(tag, attributes, text) {
  const found = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  if (text !== undefined) found.textContent = text;
  return found;
}
function noteTtft(now) {
  const quantiles = {};
  if (snapshots.length > 1) for (const bucket of BUCKETS) {
    const steps = histogram("time_to_first_token_seconds", bucket, CHART_WINDOW_S);
    if (steps.length && steps.at(-1)[1]) quantiles[bucket] = [quantile(steps, 0.5), quantile(steps, 0.99)];
  }
  moments.push({at: now, quantiles});
  moments = moments.filter(it => now - it.at < CHART_S);
  showChart();
}
/* 1, 2 and 5 times powers of ten around all values, two or more; of more than two decades only the powers. */
function ticksAround(least, most) {
  const powers = Array.from({length: 10}, (_, i) => 10 ** (i - 5)), factors = most / least > 100 ? [1] : [1, 2, 5];
  const all = powers.flatMap(power => factors.map(factor => Number((factor * power).toPrecision(1))));
  const first = Math.max(0, all.findLastIndex(it => it <= least)), last = all.findIndex(it => it >= most);
  return all.slice(first, Math.max(last, first + 1) + 1);
}
function showChart() {
  const which = Number($("charted").value), width = Math.max(200, $("chart").clientWidth), [left, bottom] = [58, CHART_HEIGHT - 22];
  const found = BUCKETS.filter(bucket => moments.some(it => it.quantiles[bucket]));
  if (!found.length) { $("chart").replaceChildren(make("p", {class: "note"}, "No request in the last minute. The chart begins with the next one.")); return; }
  const values = moments.flatMap(it => Object.values(it.quantiles).map(pair => pair[which]));
  const ticks = ticksAround(Math.max(1e-4, Math.min(...values)), Math.max(...values)), [low, high] = [ticks[0], ticks.at(-1)].map(Math.log10);
  const [first, last] = [moments[0].at, moments.at(-1).at], span = Math.max(30, last - first);
  const x = at => left + (width - left - 8) * (1 - (last - at) / span);
  const y = value => bottom - (bottom - 8) * (Math.log10(Math.max(value, 1e-4)) - low) / (high - low);
  const newest = found.map(bucket => bucket + " " + seconds(moments.findLast(it => it.quantiles[bucket]).quantiles[bucket][which]));
  const svg = draw("svg", {viewBox: "0 0 " + width + " " + CHART_HEIGHT, role: "img", "aria-label": "Time to first token, " + (which ? "p99" : "p50") + " of a minute, newest: " + newest.join(", ")});
  for (const tick of ticks) svg.append(draw("line", {class: "grid", x1: left, x2: width - 8, y1: y(tick), y2: y(tick)}),
    draw("text", {x: left - 6, y: y(tick) + 4, "text-anchor": "end"}, seconds(tick)));
  svg.append(draw("text", {x: left, y: CHART_HEIGHT - 4}, span < 120 ? Math.round(span) + " s ago" : Math.round(span / 60) + " min ago"), draw("text", {x: width - 8, y: CHART_HEIGHT - 4, "text-anchor": "end"}, "now"));
  for (const bucket of found) {
    const group = draw("g", {class: "b" + BUCKETS.indexOf(bucket)});
    let run = [];
    const end = () => {
      if (run.length === 1) group.append(draw("circle", {class: "dot", cx: run[0][0], cy: run[0][1], r: 2.5}));
      if (run.length > 1) group.append(draw("polyline", {class: "curve", points: run.map(it => it[0].toFixed(1) + "," + it[1].toFixed(1)).join(" ")}));
      run = [];
    };
    for (const it of moments) if (it.quantiles[bucket]) run.push([x(it.at), y(it.quantiles[bucket][which])]); else end();
    end();
    svg.append(group);
  }
  const legend = make("div", {class: "row"}, ...found.map(bucket => {
    const sample = draw("svg", {viewBox: "0 0 26 8", "aria-hidden": "true"});
    sample.append(draw("line", {class: "curve", x1: 0, x2: 26, y1: 4, y2: 4}));
    return make("span", {class: "key b" + BUCKETS.indexOf(bucket), ...titled(bucket)}, sample, make("span", {}, bucket));
  }));
  $("chart").replaceChildren(svg, legend);
}
