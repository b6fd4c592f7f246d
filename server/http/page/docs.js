"use strict";
/* /openapi.json as a page: every route with its fields, a call to try and the same call for a shell. */
const METHODS = ["get", "post", "put", "patch", "delete"];
let schemas = {};

/* Markdown's `code` and paragraphs, which is all that the document uses beside bold. */
function prose(text) {
  return (text || "").split(/\n\s*\n/).filter(it => it.trim()).map(paragraph => make("p", {},
    ...paragraph.replaceAll("**", "").split("`").map((part, index) => index % 2 ? make("code", {}, part) : part)));
}
const nameOf = reference => reference.split("/").pop();
const titleOf = name => name.split("__").pop();

/* The values that a schema allows, as a line of text. */
function typeOf(schema) {
  if (schema === true || schema === undefined) return "any value";
  if (schema.$ref) return titleOf(nameOf(schema.$ref));
  const several = schema.anyOf || schema.oneOf;
  if (several) return several.map(typeOf).filter(it => it !== "null").join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.filter(it => it !== null).map(it => JSON.stringify(it)).join(" or ") || "null";
  if (schema.type === "array") return "array of " + (schema.prefixItems ? "" : typeOf(schema.items)) + counts(schema.minItems, schema.maxItems, " items");
  if (schema.type === "string") return "string" + counts(schema.minLength, schema.maxLength, " characters");
  if (schema.type === "object" && schema.additionalProperties instanceof Object && Object.keys(schema.additionalProperties).length)
    return "object of " + typeOf(schema.additionalProperties) + counts(schema.minProperties, schema.maxProperties, " fields");
  const bound = (sign, value) => value === undefined ? "" : sign + (Math.abs(value) < 2 ** 53 ? value : value.toExponential(2));
  const least = bound("≥ ", schema.minimum) || bound("> ", schema.exclusiveMinimum);
  const most = bound("≤ ", schema.maximum) || bound("< ", schema.exclusiveMaximum);
  return [[schema.type || "any value"].flat().join(" or "), [least, most].filter(Boolean).join(", ")].filter(Boolean).join(" ");
}
const counts = (least, most, what) => least === undefined && most === undefined ? "" : ", " + (least || 0) + (most === undefined ? " or more" : " to " + most) + what;

/* The schemas of ours that one names at its first level. */
function namedIn(schema) {
  if (!(schema instanceof Object)) return [];
  if (schema.$ref) return [nameOf(schema.$ref)];
  return [...(schema.anyOf || []), ...(schema.oneOf || []), schema.items, schema.additionalProperties].flatMap(namedIn);
}
function fields(schema) {
  const rows = Object.entries(schema.properties || {}).map(([name, field]) => {
    const isNeeded = (schema.required || []).includes(name);
    const standard = field.default !== undefined && field.default !== null ? "; default " + JSON.stringify(field.default) : "";
    return make("tr", {}, make("td", {}, make("code", {}, name), isNeeded ? " (needed)" : ""), make("td", {}, typeOf(field) + standard), make("td", {}, ...prose(field.description)));
  });
  return rows.length ? make("table", {}, make("tbody", {}, ...rows)) : make("p", {class: "dim"}, typeOf(schema));
}
/* A schema, and those that its fields name, each made when it is opened. `outer` are the names around it. */
function shape(schema, outer = []) {
  const named = schema.$ref ? nameOf(schema.$ref) : null;
  const body = named ? schemas[named] : schema;
  const inner = [...new Set([...Object.values(body.properties || {}), ...(body.properties ? [] : [body])].flatMap(namedIn))].filter(it => !outer.includes(it) && it !== named);
  return [...prose(body.description), fields(body), ...inner.map(name => folded([make("code", {}, titleOf(name))], () => shape({$ref: "#/" + name}, [...outer, named, name])))];
}
function folded(summary, content) {
  const found = make("details", {}, make("summary", {}, ...summary));
  found.addEventListener("toggle", () => { if (found.open && found.childElementCount === 1) found.append(...content()); });
  return found;
}
function ofContent(content) {
  return Object.entries(content || {}).flatMap(([media, {schema, itemSchema}]) => {
    const shown = schema || itemSchema;
    return [make("p", {class: "dim"}, media + (itemSchema && !schema ? ", for each event" : "")), ...(shown ? shape(shown) : [])];
  });
}
function operation(method, path, found) {
  const body = found.requestBody && found.requestBody.content;
  const parameters = (found.parameters || []).map(it => make("p", {}, make("code", {}, it.name), " in the " + it.in + ": " + typeOf(it.schema) + ". ", it.description));
  const answers = Object.entries(found.responses || {}).map(([status, it]) => folded([make("b", {}, status), make("span", {}, it.description)], () => ofContent(it.content)));
  return [...prose(found.description).slice(1), trial(method, path, found), ...parameters, ...(body ? [make("h3", {}, "Body"), ...ofContent(body)] : []), make("h3", {}, "Answers"), ...answers];
}

/* --- try it --- */
const MOST_SHOWN = 200000; // characters of an answer
/* A body to begin with: of the fields those that have an example, and few tokens where their number can be said. */
function exampleOf(found) {
  const content = found.requestBody && found.requestBody.content["application/json"];
  if (!content) return null;
  const fields = schemas[nameOf(content.schema.$ref)].properties || {}, body = {};
  for (const [name, field] of Object.entries(fields)) if (field.examples) body[name] = field.examples[0];
  for (const name of ["max_tokens", "max_output_tokens"]) if (fields[name] && !body[name]) body[name] = 64;
  return JSON.stringify(body, null, 2);
}
function keyOf(found) {
  const kinds = (found.security || []).flatMap(Object.keys);
  return kinds.length ? (kinds.includes("tenants") ? userKey() : keys.operator) : "";
}
function trial(method, path, found) {
  const id = found.operationId + "-try", given = exampleOf(found), inputs = new Map();
  const body = given === null ? null : make("textarea", {id: id + "-body", spellcheck: "false", rows: Math.min(14, given.split("\n").length + 1)});
  if (body) body.value = given;
  const labelled = (name, where) => {
    const it = make("input", {id: id + "-" + name, autocomplete: "off", spellcheck: "false"});
    inputs.set(name, {input: it, where});
    return [make("label", {for: it.id}, name + ", in the " + where), it];
  };
  const places = (found.parameters || []).flatMap(it => labelled(it.name, it.in));
  const curl = make("pre", {tabindex: "0"}), note = make("p", {class: "dim", role: "status"}), answer = make("pre", {tabindex: "0", hidden: ""});
  const requestOf = () => {
    const headers = body ? {"Content-Type": "application/json"} : {}, query = new URLSearchParams();
    let place = path.slice(1);
    for (const [name, {input, where}] of inputs) {
      if (where === "path") place = place.replace("{" + name + "}", input.value ? encodeURIComponent(input.value) : "{" + name + "}");
      else if (input.value && where === "query") query.append(name, input.value);
      else if (input.value) headers[name] = input.value;
    }
    return {url: new URL(place + (query.size ? "?" + query : ""), base).href.replaceAll("%7B", "{").replaceAll("%7D", "}"), headers, body: body ? body.value : undefined};
  };
  const showCurl = () => {
    const {url, headers, body: text} = requestOf(), shown = {...headers};
    const flags = Object.entries(shown).map(([name, value]) => " \\\n  -H " + shell(name + ": " + value));
    if ((found.security || []).length) flags.push(" \\\n  -H \"Authorization: Bearer $HALLMARK_API_KEY\"");
    let compact = text;
    try { compact = text && JSON.stringify(JSON.parse(text)); } catch { /* as it is written */ }
    curl.textContent = "curl " + (method === "get" || (method === "post" && body) ? "" : "-X " + method.toUpperCase() + " ") + (body ? "-N " : "") + shell(url) + flags.join("") + (body ? " \\\n  -d " + shell(compact) : "");
  };
  let running = null;
  const send = button("Send", async () => {
    if (running) { running.abort(); return; }
    const {url, headers, body: text} = requestOf(), began = performance.now();
    if (url.includes("{")) { note.textContent = "Fill what stands in { } first."; return; }
    running = new AbortController();
    send.textContent = "Stop"; note.textContent = "Sent."; answer.hidden = true; answer.textContent = "";
    try {
      const response = await call(url, keyOf(found), {method: method.toUpperCase(), headers, body: text, signal: running.signal});
      answer.hidden = false;
      for await (const it of textsOf(response)) if (answer.textContent.length < MOST_SHOWN) answer.append(it);
      const isJson = (response.headers.get("content-type") || "").startsWith("application/json");
      if (isJson && answer.textContent.length < MOST_SHOWN) try { answer.textContent = JSON.stringify(JSON.parse(answer.textContent), null, 2); } catch { /* as it came */ }
      if (answer.textContent.length >= MOST_SHOWN) answer.append("\n… (the rest is not shown)");
      const named = [...response.headers].filter(([name]) => name.startsWith("x-")).map(([name, value]) => name + ": " + value);
      note.textContent = [response.status + " after " + Math.round(performance.now() - began) + " ms", ...named].join(" · ");
    } catch (it) { note.textContent = it.name === "AbortError" ? "Stopped." : "The server did not answer: " + it.message; }
    running = null;
    send.textContent = "Send";
  }, "main");
  const part = make("div", {class: "try"}, make("h3", {}, "Try it"), ...places, ...(body ? [make("label", {for: body.id}, "body"), body] : []),
    make("div", {class: "row"}, send, button("Copy curl", it => copy(it, curl.textContent, curl), "")), curl, note, answer);
  part.addEventListener("input", showCurl);
  showCurl();
  return part;
}
/* Hide the routes that have not the word in their path, text, or fields of their body. */
function search() {
  const word = $("search").value.trim().toLowerCase();
  for (const it of $("routes").querySelectorAll(":scope > details")) it.hidden = !it.searched.includes(word);
  for (const it of $("routes").querySelectorAll(":scope > h2")) {
    let next = it.nextElementSibling, hasAny = false;
    for (; next && next.tagName === "DETAILS"; next = next.nextElementSibling) hasAny ||= !next.hidden;
    it.hidden = !hasAny;
  }
}
function show(found) {
  schemas = (found.components && found.components.schemas) || {};
  $("version").textContent = found.info.version;
  $("introduction").replaceChildren(...prose(found.info.description));
  const groups = new Map();
  for (const [path, methods] of Object.entries(found.paths)) for (const method of METHODS) if (methods[method]) {
    const tag = (methods[method].tags || ["other"])[0];
    if (!groups.has(tag)) groups.set(tag, []);
    const summary = [make("b", {}, method.toUpperCase()), make("code", {}, path), " ", make("span", {}, (methods[method].description || "").split("\n\n")[0])];
    const route = folded(summary, () => operation(method, path, methods[method])), content = ((methods[method].requestBody || {}).content || {})["application/json"];
    route.searched = (path + JSON.stringify(methods[method]) + (content ? JSON.stringify(schemas[nameOf(content.schema.$ref)]) : "")).toLowerCase();
    groups.get(tag).push(route);
  }
  $("routes").replaceChildren(...[...groups].flatMap(([tag, routes]) => [make("h2", {}, tag), ...routes]));
}
async function load() {
  const {status, body, message} = await get("openapi.json", userKey());
  $("keys").hidden = status !== 401;
  $("note").hidden = status === 200 || (status === 401 && !userKey());
  $("note").textContent = message;
  if (status === 200 && body) show(body);
}
$("search").addEventListener("input", search);
$("keys").addEventListener("submit", event => {
  event.preventDefault();
  keys.user = $("key").value.trim();
  sessionStorage.setItem("hallmark-user", keys.user);
  $("key").value = "";
  load();
});
load();
