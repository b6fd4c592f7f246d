"use strict";
/* Markdown as nodes. marked finds the structure; each text becomes a text node, tags in it too, and an image a link:
   nothing that a model writes is parsed as HTML, and nothing is fetched for it. */
const ENTITIES = {amp: "&", lt: "<", gt: ">", quot: "\"", apos: "'", nbsp: "\u00a0"};
const SCHEMES = ["http:", "https:", "mailto:"];
const MOST_LEVELS = 40; // of lists and quotes in one another; deeper ones are shown as they were written

function markdown(text) {
  const state = {heading: 2, level: 0};
  try { return blocks(marked.lexer(text, {gfm: true, breaks: true}), state); }
  catch { return [make("p", {}, text)]; } // marked refuses what would nest without end
}
function blocks(tokens, state) {
  if (state.level >= MOST_LEVELS) return tokens.map(it => document.createTextNode(it.raw));
  state.level += 1;
  const nodes = tokens.flatMap(it => block(it, state));
  state.level -= 1;
  return nodes;
}
function block(token, state) {
  switch (token.type) {
    case "space": case "def": return [];
    case "heading": state.heading = Math.min(token.depth + 2, state.heading + 1, 6); return [make("h" + state.heading, {}, ...inline(token.tokens, state))];
    case "paragraph": return [make("p", {}, ...inline(token.tokens, state))];
    case "code": return [codeBlock(token)];
    case "blockquote": return [make("blockquote", {}, ...blocks(token.tokens, state))];
    case "hr": return [make("hr")];
    case "list": return [make(token.ordered ? "ol" : "ul", token.ordered && token.start !== 1 ? {start: token.start} : {},
      ...token.items.map(it => make("li", {}, ...blocks(it.tokens, state))))];
    case "checkbox": return [document.createTextNode(token.checked ? "☑ " : "☐ ")];
    case "table": return [make("div", {class: "wide", tabindex: "0"}, make("table", {}, make("thead", {}, rowOf("th", token.header, state)),
      make("tbody", {}, ...token.rows.map(it => rowOf("td", it, state)))))];
    case "text": return token.tokens ? inline(token.tokens, state) : [document.createTextNode(plain(token.text))];
    case "html": return [make("p", {}, token.raw.trimEnd())];
    default: return inline([token], state);
  }
}
const rowOf = (tag, cells, state) => make("tr", {}, ...cells.map(it => make(tag, {...(tag === "th" ? {scope: "col"} : {}), ...(it.align === "right" ? {class: "number"} : {})}, ...inline(it.tokens, state))));
function codeBlock(token) {
  const pre = make("pre", {tabindex: "0"}, make("code", {}, token.text));
  const head = make("div", {class: "row"}, make("span", {class: "small dim"}, (token.lang || "code").split(" ")[0]), button("Copy", it => copy(it, token.text, pre)));
  return make("div", {class: "code"}, head, pre);
}
function inline(tokens, state) {
  if (state.level >= MOST_LEVELS) return tokens.map(it => document.createTextNode(it.raw));
  state.level += 1;
  const nodes = tokens.map(token => {
    switch (token.type) {
      case "strong": case "em": case "del": return make(token.type, {}, ...inline(token.tokens, state));
      case "codespan": return make("code", {}, token.text);
      case "br": return make("br");
      case "link": return link(token.href, inline(token.tokens, state), token.raw);
      case "image": return link(token.href, [token.text || "image"], token.raw);
      case "text": return token.tokens ? make("span", {}, ...inline(token.tokens, state)) : document.createTextNode(plain(token.text));
      case "escape": return document.createTextNode(token.text);
      default: return document.createTextNode(token.raw);
    }
  });
  state.level -= 1;
  return nodes;
}
/* A link that opens elsewhere and says where it leads; one of another scheme stays the text that was written. */
function link(href, content, raw) {
  const url = URL.canParse(href) ? new URL(href) : null;
  if (url === null || !SCHEMES.includes(url.protocol)) return document.createTextNode(raw);
  return make("a", {href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow"}, ...content);
}
function plain(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|(\w{2,4}));/g, (raw, decimal, hex, name) => {
    if (name) return ENTITIES[name] || raw;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code > 0 && code <= 0x10FFFF ? String.fromCodePoint(code) : "\ufffd";
  });
}
