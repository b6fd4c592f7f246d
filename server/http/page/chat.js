"use strict";
/* The chat: a conversation that is kept over a reload, and the answer that is being written. */
const EXAMPLES = ["Tell me a story about a lighthouse.", "Explain the difference between TCP and UDP in a table.", "Write a Python function that reverses a string, with a test."];
const MOST_KEPT = 200, MOST_KEPT_CHARACTERS = 400000, KEPT_AT = "hallmark-chat " + base.pathname;
const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
let pictures = []; // data: URLs that go with the next message
let conversation = []; // {role, content}, of a user's pictures or how many a reload has dropped, and, of an answer, reasoning, calls, error, found and here (see showProof); of a tool's result, id
let running = null, edited = null, isQueued = false; // `edited`: the place of the message that the next one replaces

/* --- kept in this browser, bounded; not where it refuses to keep anything --- */
function saveChat() {
  const kept = conversation.slice(-MOST_KEPT).map(({pictures, ...it}) => pictures ? {...it, dropped: pictures.length} : it), sizes = kept.map(it => JSON.stringify(it).length);
  let total = sizes.reduce((sum, it) => sum + it, 0), first = 0;
  while (first < kept.length && (total > MOST_KEPT_CHARACTERS || kept[first].role !== "user")) total -= sizes[first++];
  try { localStorage.setItem(KEPT_AT, JSON.stringify({system: $("system").value, tools: $("tools").value, conversation: kept.slice(first)})); }
  catch { say("This browser does not keep the chat over a reload."); }
}
function loadChat() {
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem(KEPT_AT)) || {}; } catch { /* forbidden, or not ours */ }
  conversation = Array.isArray(kept.conversation) ? kept.conversation.filter(it => it && typeof it.content === "string") : [];
  $("system").value = typeof kept.system === "string" ? kept.system : "";
  $("tools").value = typeof kept.tools === "string" ? kept.tools : "";
  $("settings").open = Boolean($("system").value || $("tools").value);
  showMessages();
}
function clearChat() {
  if (running) running.abort();
  conversation = []; edited = null; isQueued = false;
  pictures = [];
  showPictures();
  saveChat();
  showMessages();
  $("prompt").focus();
}

/* --- messages --- */
function showMessages() {
  const chosen = text => { $("prompt").value = text; $("prompt").focus(); };
  $("messages").replaceChildren(...(conversation.length ? conversation.map(messageOf)
    : [make("div", {class: "examples"}, make("p", {class: "note"}, "Ask something, or begin with one of these:"), ...EXAMPLES.map(it => button(it, () => chosen(it), "")))]));
  $("messages").scrollTop = $("messages").scrollHeight;
}
function messageOf(message, place) {
  const found = make("div", {class: "message " + message.role + (place === edited ? " edited" : "")});
  const isLast = place === conversation.length - 1, isWritten = running === null || !isLast, actions = make("div", {class: "row actions"});
  if (message.role === "assistant") {
    if (message.reasoning) found.append(make("details", isWritten || message.content ? {} : {open: ""}, make("summary", {}, "reasoning"), make("p", {class: "note"}, message.reasoning)));
    found.append(make("div", {class: "answer"}, ...markdown(message.content)), ...(message.calls || []).map(it => callOf(it, isLast && isWritten)), make("div", {class: "proof"}));
    if (isWritten) showProof(found.lastChild, message);
  } else if (message.role === "tool") found.append(make("div", {class: "small dim"}, "result of " + message.name), make("p", {}, message.content));
  else found.append(...(message.pictures || []).map(pictureOf), message.dropped ? make("p", {class: "note"}, message.dropped + " image(s), which the reload has dropped") : "", make("p", {}, message.content));
  if (!isWritten) return found;
  if (message.content) actions.append(button("Copy", it => copy(it, message.content, found)));
  if (message.role === "user") actions.append(button("Edit", () => edit(place)));
  if (isLast && message.role === "user") actions.append(button("Ask again", regenerate)); // its answer was cut off by a reload
  if (isLast && message.role === "assistant") {
    if ((message.calls || []).length) actions.append(button("Send results", sendResults, "main"));
    actions.append(button("Regenerate", regenerate));
  }
  found.append(actions);
  return found;
}
function callOf(made, isOpen) {
  let given = made.arguments;
  try { given = JSON.stringify(JSON.parse(given), null, 2); } catch { /* cut, or not JSON: as it came */ }
  const found = make("div", {class: "call"}, make("div", {class: "row"}, chip("tool call", "info"), make("code", {}, made.name)), make("pre", {tabindex: "0"}, given));
  if (isOpen) found.append(make("label", {}, "its result, for the model", make("textarea", {rows: "2", "data-call": made.id})));
  return found;
}
function showProof(place, {found, here, error}) {
  const rows = [];
  if (error) rows.push(make("div", {class: "row"}, chip(error === "Stopped." ? "stopped" : "error", error === "Stopped." ? "warn" : "bad"), make("span", {}, error)));
  const speed = here ? speedOf(here) : null;
  const facts = here ? [speed, "first token " + (here.first === null ? "–" : Math.round(here.first - here.began) + " ms here")] : [];
  if (found) {
    facts.push("TTFT " + (found.ttft_ms === null ? "–" : found.ttft_ms.toFixed(1) + " ms in the server"), make("span", titled(found.bucket), found.bucket), found.cached_tokens + " cached tokens");
    rows.push(make("div", {class: "row"}, found.status ? chip(found.status) : null, ...found.phases.map(it => make("span", {}, it.phase + " " + it.path + " ",
      it.status === found.status ? null : chip(it.status), it.fallback_reasons.length ? chip("fallback: " + it.fallback_reasons.join(", "), "warn", "fallback") : null))));
    if (found.attestation) facts.push(make("span", titled("attestation"), "attestation " + found.attestation.id + " " + found.attestation.result));
    facts.push(make("span", titled(found.matrix_digest ? "matrix" : "matrix none"), "matrix " + (found.matrix_digest || "none")));
  }
  rows.push(make("div", {}, ...facts.filter(Boolean).flatMap((it, i) => i ? [" · ", it] : [it])));
  place.replaceChildren(...rows);
}

/* Of the tokens behind the first; where all came in one read, of the whole answer. */
function speedOf({began, first, last, numTokens}) {
  if (numTokens < 2 || first === null) return null;
  return (last > first ? (numTokens - 1) / (last - first) * 1000 : numTokens / (last - began) * 1000).toFixed(1) + " tokens a second";
}

/* --- pictures, dropped, pasted or chosen --- */
function pictureOf(url, place) { return make("img", {class: "picture", src: url, alt: "image " + (place + 1) + " of the message"}); }
function showPictures() {
  const without = place => { pictures.splice(place, 1); showPictures(); $("prompt").focus(); };
  $("pictures").replaceChildren(...pictures.map((it, i) => make("span", {class: "row"}, pictureOf(it, i), button("Remove", () => without(i)))));
  $("pictures").hidden = !pictures.length;
}
async function addPictures(files) {
  const known = [...files].filter(it => PICTURES.includes(it.type));
  if (!known.length) return say("Images are PNG, JPEG, WebP or GIF.");
  if (!seesImages) return say("This model sees no images.");
  for (const file of known) pictures.push(await new Promise((done, failed) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => failed(reader.error));
    reader.readAsDataURL(file);
  }));
  say(pictures.length + " image(s) go with the next message.");
  showPictures();
}

/* --- sending --- */
function say(text) { $("said").textContent = text; }
/* Esc and Stop: end the answer that is being written, or the editing. */
function leave() {
  if (running) running.abort();
  else if (edited !== null) { edited = null; $("prompt").value = ""; pictures = []; showPictures(); say(""); showMessages(); }
}
function edit(place) {
  if (running) return;
  edited = place;
  $("prompt").value = conversation[place].content;
  pictures = [...conversation[place].pictures || []];
  showPictures();
  $("prompt").focus();
  say("Send replaces this message and all that follows it. Esc leaves it as it is.");
  showMessages();
}
async function send() {
  const text = $("prompt").value.trim();
  if ((!text && !pictures.length) || !isReady) return;
  if (running) { isQueued = true; say("Sent when this answer has ended; Esc stops it."); return; }
  $("prompt").value = "";
  if (edited !== null) conversation.length = edited; else addResults();
  edited = null;
  conversation.push({role: "user", content: text, ...(pictures.length ? {pictures} : {})});
  pictures = [];
  showPictures();
  await answer();
}
async function sendResults() { if (!running && isReady) { addResults(); await answer(); } }
async function regenerate() { if (!running && isReady) {
  edited = null;
  if (conversation.at(-1).role === "assistant") conversation.pop();
  await answer();
} }
function addResults() {
  const last = conversation.at(-1), typed = id => $("messages").querySelector("[data-call=" + CSS.escape(id) + "]");
  for (const made of (last && last.calls) || []) conversation.push({role: "tool", id: made.id, name: made.name, content: typed(made.id) ? typed(made.id).value : ""});
}
/* The messages of the next request. A question whose answer never came is left out, or two would follow each other. */
function turns() {
  const sent = [];
  for (const it of conversation) {
    const hasCalls = Boolean(it.calls && it.calls.length);
    if (it.role === "tool") sent.push({role: "tool", tool_call_id: it.id, content: it.content});
    else if (it.role === "user" || it.content || hasCalls) {
      if (it.role === "user" && sent.length && sent.at(-1).role === "user") sent.pop();
      const seen = (it.pictures || []).map(url => ({type: "image_url", image_url: {url}}));
      sent.push({role: it.role, content: seen.length ? [...seen, {type: "text", text: it.content}] : it.content, ...(hasCalls ? {tool_calls: it.calls.map(each => ({id: each.id, type: "function", function: {name: each.name, arguments: each.arguments}}))} : {})});
    } else while (sent.length && sent.at(-1).role !== "assistant") sent.pop();
  }
  const system = $("system").value.trim();
  return system ? [{role: "system", content: system}, ...sent] : sent;
}
/* Of the form's fields those that are filled. Throws where the tools are not a JSON array. */
function requestOf(messages) {
  const body = {messages, stream: true, stream_options: {include_usage: true}, hallmark: true, max_tokens: Number($("max-tokens").value) || 512};
  for (const [field, id] of [["temperature", "temperature"], ["top_p", "top-p"], ["seed", "seed"]]) if ($(id).value !== "") body[field] = Number($(id).value);
  const tools = $("tools").value.trim();
  if (tools) body.tools = JSON.parse(tools);
  if (body.tools !== undefined && !Array.isArray(body.tools)) throw new SyntaxError("not an array");
  return body;
}
async function answer() {
  const message = {role: "assistant", content: "", reasoning: "", calls: [], error: null, found: null, here: {began: performance.now(), first: null, last: null, numTokens: 0}}, here = message.here;
  let body = null;
  try { body = requestOf(turns()); } catch (it) {
    message.error = "The tools are no JSON array of OpenAI's tools: " + it.message;
    conversation.push(message); showMessages(); say(message.error);
    return;
  }
  saveChat();
  conversation.push(message);
  running = new AbortController();
  $("send").disabled = true; $("stop").disabled = false;
  showMessages();
  say("The model is answering. Esc stops it.");
  const drawing = follow(message);
  try {
    const response = await call("v1/chat/completions", userKey(), {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(body), signal: running.signal});
    if (!response.ok) {
      const refusal = await response.json().catch(() => null);
      message.error = refusal && refusal.error ? refusal.error.message : "HTTP " + response.status;
    } else for await (const chunk of eventsOf(response)) {
      if (chunk.error) { message.error = chunk.error.message; break; }
      const delta = (chunk.choices[0] || {}).delta || {}, thought = delta.reasoning_content || delta.reasoning;
      if (delta.content || thought || delta.tool_calls) { here.last = performance.now(); here.first ??= here.last; }
      if (thought) message.reasoning += thought;
      if (delta.content) message.content += delta.content;
      for (const it of delta.tool_calls || []) {
        const made = message.calls[it.index] ||= {id: "", name: "", arguments: ""};
        made.id ||= it.id || "";
        made.name += (it.function && it.function.name) || "";
        made.arguments += (it.function && it.function.arguments) || "";
      }
      if (chunk.usage) here.numTokens = chunk.usage.completion_tokens;
      if (chunk.hallmark) message.found = chunk.hallmark;
      drawing.mark();
    }
  } catch (it) { message.error = it.name === "AbortError" ? "Stopped." : "The connection broke."; }
  drawing.end();
  running = null;
  $("stop").disabled = true; $("send").disabled = !isReady;
  if (conversation.at(-1) === message) { showMessages(); saveChat(); } // else it was cleared
  say(message.error || "The answer is complete.");
  poll();
  const isNext = isQueued && !message.error;
  isQueued = false;
  if (isNext) send();
}
/* Show an answer while it grows: at most once a frame, and in a tenth of the time at most, however long it is. */
function follow(message) {
  let isDirty = false, timer = null;
  const show = () => {
    timer = null;
    if (!isDirty || conversation.at(-1) !== message) return;
    const began = performance.now(), box = $("messages"), isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    isDirty = false;
    box.lastChild.replaceWith(messageOf(message, conversation.length - 1));
    if (isAtEnd) box.scrollTop = box.scrollHeight;
    timer = setTimeout(show, Math.max(16, 9 * (performance.now() - began)));
  };
  return {mark() { isDirty = true; timer ??= setTimeout(show, 16); }, end() { clearTimeout(timer); }};
}
