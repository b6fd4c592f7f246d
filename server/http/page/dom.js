"use strict";
/* What both pages share: elements, calls to this server, events of a stream, the keys of this tab, copying. */
const base = new URL(".", location.href);
const $ = id => document.getElementById(id);
const keys = {user: sessionStorage.getItem("hallmark-user") || "", operator: sessionStorage.getItem("hallmark-operator") || ""};
const userKey = () => keys.user || keys.operator;
const shell = text => "'" + text.replaceAll("'", "'\\''") + "'";

/* Text becomes text nodes only: nothing here parses HTML. */
function make(tag, attributes, ...children) {
  const found = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) found.setAttribute(name, value);
  found.append(...children.filter(it => it !== null && it !== undefined).map(it => it instanceof Node ? it : String(it)));
  return found;
}
function button(text, onClick, kind = "minor") {
  const found = make("button", {type: "button", class: kind}, text);
  found.addEventListener("click", () => onClick(found));
  return found;
}
async function call(path, key, options = {}) {
  const headers = {...options.headers};
  if (key) headers.Authorization = "Bearer " + key;
  return fetch(new URL(path, base), {cache: "no-store", ...options, headers});
}
/* {status, body, message}; status 0 where nobody answers. */
async function get(path, key, isText) {
  try {
    const response = await call(path, key);
    const body = isText && response.ok ? await response.text() : await response.json().catch(() => null);
    return {status: response.status, body, message: body && body.error ? body.error.message : "HTTP " + response.status};
  } catch { return {status: 0, body: null, message: "The server does not answer."}; }
}
async function* textsOf(response) {
  const decoder = new TextDecoder(), reader = response.body.getReader();
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    yield decoder.decode(value, {stream: true});
  }
}
async function* eventsOf(response) {
  let rest = "";
  for await (const text of textsOf(response)) {
    const lines = (rest + text).split("\n\n");
    rest = lines.pop();
    for (const it of lines) if (it.startsWith("data: ") && it !== "data: [DONE]") yield JSON.parse(it.slice(6));
  }
}
/* Put a text into the clipboard, or select `source` where the browser refuses (a page without TLS). */
async function copy(pressed, text, source) {
  const name = pressed.textContent;
  try { await navigator.clipboard.writeText(text); pressed.textContent = "Copied"; }
  catch { getSelection().selectAllChildren(source); pressed.textContent = "Selected: press Ctrl and C"; }
  setTimeout(() => { pressed.textContent = name; }, 2000);
}
