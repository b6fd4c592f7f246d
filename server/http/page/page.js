"use strict";
/* Model, state and keys; what is asked again and again; and the listeners. */
const POLL_MS = 3000, PLAN_EVERY = 5;
let model = null, task = "generate", isChatHere = true, isReady = null, refused = null, ticks = 0, timer = null;
let seesImages = false, isKeyNeeded = false, isPolling = false, isModelAsked = false;

function showState({status, body}) {
  const was = isReady;
  isReady = status === 200;
  const reasons = (body && body.reasons) || [];
  const hasDied = reasons.some(it => it.includes("restarting"));
  const [text, kind] = isReady ? ["ready", "good"] : status === 0 ? ["no answer", "bad"] : hasDied ? ["engine died", "bad"] : ["not ready", "warn"];
  $("state").textContent = text;
  $("state").className = "chip " + kind;
  const why = status === 0 ? ["The server does not answer at " + base.origin + ". This page tries again."]
    : hasDied ? ["The engine died and is being restarted; answers under way have ended with an error."] : ["The server is not ready: " + (reasons.join("; ") || "it answers " + status + ".")];
  const shown = isReady ? "" : why.join(" ");
  $("banner").hidden = isReady;
  $("banner").className = kind;
  if ($("banner").textContent !== shown) $("banner").textContent = shown;
  $("send").disabled = !isReady || !isChatHere || running !== null;
  return was !== isReady;
}
async function refreshModel() {
  const {status, body, message} = await get("v1/models", userKey());
  const isApiHere = status !== 404;
  if (status === 200) task = body.data[0].task;
  if (status === 200) seesImages = body.data[0].input_modalities.includes("image");
  $("picture-label").hidden = !seesImages;
  isChatHere = isApiHere && task === "generate";
  $("chat-form").hidden = $("messages").hidden = status === 401 || !isChatHere;
  $("snippets").hidden = !isApiHere;
  $("chat-note").hidden = (status === 200 && isChatHere) || status === 0;
  if (status === 401) { isKeyNeeded = true; $("chat-note").textContent = needsKey("The chat needs an API key", userKey(), message); }
  else if (!isApiHere) $("chat-note").textContent = "This is the admin port: chat and completions are on the API's port.";
  else if (status !== 200) $("chat-note").textContent = message;
  else if (!isChatHere) $("chat-note").textContent = "This model is served for " + (task === "embed" ? "embeddings" : "scores") + " (--task " + task + ") and does not chat. How to call it is below.";
  isModelAsked = status === 200 || (status >= 400 && status < 500);
  if (status === 200) { model = body.data[0].id; $("model").textContent = model; }
  else if (model === null) $("model").textContent = "";
  showSnippets();
}
function needsKey(what, given, message) {
  $("keys").hidden = false;
  $("keys").open = true;
  return given ? what + ". The one given was refused: " + message : what + ": enter it under Keys.";
}

/* One round at a time, none while nobody looks. */
async function poll() {
  clearTimeout(timer);
  if (document.hidden || isPolling) return;
  isPolling = true;
  try {
    const hasChanged = showState(await get("readyz", null));
    if (!isModelAsked || hasChanged) await refreshModel();
    if (refused === null && isReady !== null && $("state").textContent !== "no answer") {
      if (hasChanged || $("plan-body").hidden || ticks % PLAN_EVERY === 0) await refreshPlan();
      if (refused === null) await refreshFigures();
    }
    ticks += 1;
  } finally {
    isPolling = false;
    clearTimeout(timer);
    timer = document.hidden ? null : setTimeout(poll, POLL_MS);
  }
}
function useKeys(user, operator) {
  [keys.user, keys.operator] = [user, operator];
  sessionStorage.setItem("hallmark-user", user);
  sessionStorage.setItem("hallmark-operator", operator);
  $("user-key").value = $("operator-key").value = "";
  $("keys-note").textContent = user || operator ? "in use: " + [user && "API key", operator && "operator's key"].filter(Boolean).join(", ") : "";
  $("keys").open = false;
  $("keys").hidden = !user && !operator; // until a route asks for one
  refused = null; model = null; isReady = null; isModelAsked = false;
  poll();
}

document.addEventListener("visibilitychange", poll);
$("keys-form").addEventListener("submit", event => { event.preventDefault(); useKeys($("user-key").value.trim() || keys.user, $("operator-key").value.trim() || keys.operator); });
$("forget").addEventListener("click", () => useKeys("", ""));
$("chat-form").addEventListener("submit", event => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", event => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } });
$("prompt").addEventListener("input", () => { isQueued = false; });
$("picture").addEventListener("change", () => addPictures($("picture").files).then(() => { $("picture").value = ""; }));
$("prompt").addEventListener("paste", event => { if (event.clipboardData.files.length) { event.preventDefault(); addPictures(event.clipboardData.files); } });
for (const [name, isOver] of [["dragover", true], ["dragleave", false], ["drop", false]]) $("chat").addEventListener(name, event => {
  if (![...event.dataTransfer.types].includes("Files")) return;
  event.preventDefault();
  $("chat").classList.toggle("dropping", isOver);
  if (name === "drop") addPictures(event.dataTransfer.files);
});
document.addEventListener("keydown", event => { if (event.key === "Escape") leave(); });
$("stop").addEventListener("click", leave);
$("clear").addEventListener("click", clearChat);
for (const id of ["system", "tools"]) $(id).addEventListener("change", saveChat);
$("window").addEventListener("change", showTtft);
$("charted").addEventListener("change", showChart);
$("only-fallbacks").addEventListener("change", showShapes);
for (const pressed of document.querySelectorAll("[data-copy]")) pressed.addEventListener("click", () => copy(pressed, $(pressed.dataset.copy).textContent, $(pressed.dataset.copy)));
showLegends();
loadChat();
useKeys(keys.user, keys.operator);
