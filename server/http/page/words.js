"use strict";
/* What the words of the page mean: shown where a word is pointed at, and as a list for who has no pointer. */
const MEANINGS = {
  proven: "Measured right on this GPU and software stack; the evidence is in the reviewed matrix.",
  provisional: "Proven by this machine itself at its start, by the same checks. The evidence is not in the reviewed matrix.",
  stale: "Proven once, but the machine, its software or the kernel's source has changed since.",
  unproven: "Not measured on this machine.",
  failed: "Measured, and a check failed.",
  quarantined: "Taken out of service: it broke, or an operator took it out.",
  fallback: "Another kernel path serves than the wanted one, or its evidence is stale, unproven or failed.",
  match: "The kernels that were launched are those that the evidence names.",
  mismatch: "Other kernels were launched than those that the evidence names.",
  "matrix": "The digest of the matrix that was used: all evidence that was reviewed for this GPU.",
  "matrix none": "There is no reviewed matrix for this machine: what is proven here was proven at the start.",
  shape: "Everything that selects a kernel of an operator: phase, type, heads, head dim, window, lengths.",
  launches: "Attention kernels launched since the start, by the kernel path that they belong to. A batch launches one in each layer.",
  attestation: "The driver's record of the kernels that forward passes launched, held against the evidence.",
  objective: "The time to the first token that requests of this bucket should keep; above it the p99 is marked.",
  p50: "Half of the requests took no longer.",
  p99: "99 of 100 requests took no longer; of fewer than 300 requests it is noise.",
};
const LEGEND = {"plan-words": ["proven", "provisional", "stale", "unproven", "failed", "quarantined", "fallback", "shape", "matrix", "matrix none"],
  "figures-words": ["p50", "p99", "objective", "launches", "attestation", "match", "mismatch"]};
const BUCKETS = ["le_128", "le_512", "le_2k", "le_8k", "le_32k", "le_128k", "gt_128k"];

const edgeOf = bucket => Number(/\d+/.exec(bucket)[0]) * (bucket.endsWith("k") ? 1024 : 1);
function meaningOf(word) {
  const place = BUCKETS.indexOf(word);
  if (place < 0) return MEANINGS[word];
  const most = edgeOf(word), number = it => it.toLocaleString("en");
  if (word.startsWith("gt_")) return "Prompts of more than " + number(most) + " tokens.";
  return "Prompts of " + number(place ? edgeOf(BUCKETS[place - 1]) + 1 : 1) + " to " + number(most) + " tokens.";
}
const titled = word => meaningOf(word) ? {title: meaningOf(word)} : {};
function showLegends() {
  for (const [id, words] of Object.entries(LEGEND)) $(id).replaceChildren(...[...(id === "figures-words" ? BUCKETS : []), ...words]
    .flatMap(it => [make("dt", {}, it), make("dd", {}, meaningOf(it))]));
}

const CLASS_OF = {proven: "good", provisional: "info", stale: "warn", unproven: "warn", failed: "bad", quarantined: "bad",
  match: "good", mismatch: "bad", error: "bad"};
const chip = (text, kind, word = text) => make("span", {class: "chip " + (kind || CLASS_OF[word] || ""), ...titled(word)}, text);
const cell = (content, kind) => make("td", kind ? {class: kind} : {}, content);
const bucketCell = bucket => make("td", titled(bucket), bucket);
