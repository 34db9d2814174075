// Shows the last requests, each with its timeline on a scale that all share.

import { byId, choice, drawn, element, facts, keep, setAttribute, setClass, setText } from "./dom.js";
import { narrow } from "./fold.js";
import { bytes, clock, count, number, seconds } from "./format.js";

const SHOWN = { wide: 20, narrow: 5 };
const KEPT = 200;
const FILTERS = {
  All: () => true,
  Running: (request) => !request.status,
  Errors: (request) => request.broken || request.status >= 400,
  Moved: (request) => request.moves?.length > 0,
};
const SCALES = ["Whole answer", "First token"];
const KINDS = [
  ["queue", "Queue", "in this router's line, or being read"],
  ["sending", "Under way", "to the nodes and back"],
  ["prefill queue", "Prefill queue", "waiting at a node"],
  ["prefill", "Prefill", "the prompt is computed"],
  ["transfer", "KV transfer", "beside the rest"],
  ["decode", "Decode", "from the first token on"],
  ["move", "Move", "another decode node goes on"],
];
const WORDS = Object.fromEntries(KINDS.map(([kind, name]) => [kind, name]));

export class Requests {
  constructor() {
    this.list = byId("list");
    this.filter = "All";
    this.scale = SCALES[0];
    this.ended = [];
    this.open = [];
    this.held = null;
    this.full = 0;
    choice(byId("filter"), Object.keys(FILTERS), (name) => this.#change("filter", name));
    choice(byId("scale"), SCALES, (name) => this.#change("scale", name));
    byId("legend").append(...KINDS.map(([kind, name, about]) => legend(kind, name, about)));
    this.hasAll = false;
    byId("more").addEventListener("click", () => this.#change("hasAll", !this.hasAll));
    narrow.addEventListener("change", () => this.show());
    byId("newer").addEventListener("click", () => this.#release());
  }

  take(data) {
    if (data.full) this.ended = [];
    if (data.open) this.open = data.open;
    if (data.ended) this.ended = [...data.ended.reverse(), ...this.ended].slice(0, KEPT);
    this.show();
  }

  /** While somebody reads a request, newer ones wait, so that it stays where it is. */
  show() {
    const known = [...this.open, ...this.ended];
    const all = known.filter(FILTERS[this.filter]);
    const isRead = this.list.querySelector("details[open]") !== null;
    if (!isRead) this.held = null;
    else this.held ??= new Map(Array.from(this.list.children, (row) => [row.dataset.key, row.request]));
    const few = narrow.matches ? SHOWN.narrow : SHOWN.wide;
    const shown = this.held ? this.#stillHeld(known) : all.slice(0, this.hasAll ? KEPT : few);
    const newest = this.held ? all.filter((request) => !this.held.has(key(request))) : [];
    this.full = niceScale(Math.max(...shown.map((request) => this.#length(request)), 0.001), this.full);
    keep(this.list, shown, key, makeRow, (row, request) => updateRow(row, request, this.full));
    this.#showAxis();
    byId("none").hidden = shown.length > 0;
    setText(byId("none"), this.filter === "All" ? "No requests yet." : "None of these among the last.");
    byId("newer").hidden = newest.length === 0;
    byId("more").hidden = all.length <= few;
    setText(byId("more"), this.hasAll ? "Show fewer" : `Show all ${count(all.length)}`);
    setText(byId("newer"), `Show ${count(newest.length)} newer`);
  }

  /** What is on the page stays, as it is now or was last, also when the router has forgotten it. */
  #stillHeld(known) {
    for (const request of known) if (this.held.has(key(request))) this.held.set(key(request), request);
    return Array.from(this.held.values());
  }

  #change(name, value) {
    this.#close();
    this[name] = value;
    this.full = 0;
    this.show();
  }

  #close() {
    for (const open of this.list.querySelectorAll("details[open]")) open.open = false;
    this.held = null;
  }

  #release() {
    this.#close();
    this.show();
    this.list.querySelector("summary")?.focus();
  }

  #length(request) {
    if (this.scale === SCALES[0]) return request.total ?? 0;
    const ends = (request.segments ?? []).filter(([kind]) => kind !== "decode" && kind !== "move");
    return 1.25 * Math.max(0, ...ends.map(([, , until]) => until));
  }

  #showAxis() {
    const ticks = [0, 0.25, 0.5, 0.75, 1];
    keep(byId("axis"), ticks, (part) => part, () => element("span"), (mark, part) => {
      setText(mark, part ? seconds(this.full * part).replace(/\.0+ /, " ") : "0");
    });
  }
}

/** Stays as it is until what it must show is longer, or less than half as long. */
function niceScale(most, current) {
  if (most <= current && most > current / 2.5) return current;
  const size = 10 ** Math.floor(Math.log10(most));
  const steps = [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10];
  return size * steps.find((step) => step * size >= most * 0.9999);
}

const key = (request) => `${request.trace} ${request.id} ${request.at}`;

function legend(kind, name, about) {
  const made = element("li", "", element("span", `swatch ${kind.replace(" ", "-")}`), name);
  made.title = `${name}: ${about}`;
  return made;
}

function makeRow() {
  const parts = ["time", "who", "size", "first", "total", "status"];
  const spans = parts.map((name) => element("span", name));
  const bar = drawn("svg", { class: "timeline", role: "img", width: "100%", height: "18" });
  const summary = element("summary", "", ...spans, bar);
  return element("li", "", element("details", "", summary, element("dl", "facts")));
}

function updateRow(row, request, full) {
  const details = row.firstElementChild;
  const [time, who, size, first, total, status, bar] = details.firstElementChild.children;
  setText(time, clock(request.at));
  setAttribute(time, "title", new Date(1000 * request.at).toISOString());
  setText(who, request.id.slice(0, 12));
  setAttribute(who, "title", request.id);
  setText(size, sizes(request));
  setText(first, request.first ? seconds(request.first) : "–");
  setText(total, request.total ? seconds(request.total) : "–");
  setText(status, statusWord(request));
  setClass(status, `status ${statusClass(request)}`);
  drawTimeline(bar, request, full);
  if (details.open) facts(details.lastElementChild, allFacts(request));
  else details.ontoggle ??= () => facts(details.lastElementChild, allFacts(row.request));
  row.request = request;
}

const sizes = (request) => `${request.guess ? "≈" : ""}${number(request.prompt ?? 0)} → ${number(request.tokens ?? 0)}`;

function statusWord(request) {
  if (!request.status) return "running";
  if (request.broken) return "broken";
  if (request.status === 499) return "left";
  return request.status === 200 ? "done" : String(request.status);
}

function statusClass(request) {
  if (!request.status) return "live";
  if (request.broken || request.status >= 500) return "bad";
  return request.status === 200 ? "good" : "doubtful";
}

function drawTimeline(svg, request, full) {
  const segments = request.segments ?? [];
  const x = (at) => `${Math.min(100, (100 * at) / full).toFixed(2)}%`;
  const width = (from, until) => `${Math.max(0.15, (100 * (Math.min(until, full) - from)) / full).toFixed(2)}%`;
  const seen = segments.filter(([, from, until]) => until > from && from < full);
  const isNew = svg.childElementCount !== seen.length + 1;
  if (isNew) svg.replaceChildren(...seen.map(() => drawn("rect")), drawn("rect", { class: "token" }));
  seen.forEach(([kind, from, until], i) => {
    const rect = svg.children[i];
    const isBeside = kind === "transfer";
    setAttribute(rect, "class", kind.replace(" ", "-"));
    setAttribute(rect, "x", x(from));
    setAttribute(rect, "width", width(from, until));
    setAttribute(rect, "y", isBeside ? 14 : 3);
    setAttribute(rect, "height", isBeside ? 4 : 9);
  });
  const token = svg.lastElementChild;
  setAttribute(token, "x", request.first ? x(request.first) : "-10");
  for (const [name, value] of [["y", 0], ["width", 2], ["height", 14]]) setAttribute(token, name, value);
  setAttribute(svg, "aria-label", spoken(request));
}

/** The timeline in words. */
function spoken(request) {
  const parts = (request.segments ?? [])
    .filter(([, from, until]) => until > from)
    .map(([kind, from, until]) => `${WORDS[kind] ?? kind} ${seconds(until - from)}`);
  if (request.first) parts.push(`first token after ${seconds(request.first)}`);
  return parts.length ? `Timeline: ${parts.join(", ")}.` : "No timeline.";
}

function allFacts(request) {
  const moves = (request.moves ?? []).map(([why, node]) => `${why.replace("_", " ")}, went on at ${node}`);
  const cached = request.cached ? `, ${count(request.cached)} from the cache` : "";
  const expected = request.predicted ? ` (${seconds(request.predicted)} expected)` : "";
  const pairs = [
    ["Request", request.id],
    ["Trace", request.trace],
    ["Path", `${request.path}${request.model ? `, ${request.model}` : ""}`],
    ["Tenant", request.tenant],
    ["Session", request.session],
    ["Prompt", `${request.guess ? "about " : ""}${count(request.prompt ?? 0)} tokens${cached}`],
    ["Answer", `${count(request.tokens ?? 0)} tokens, status ${request.status || "not yet"}`],
    ["First token", request.first ? seconds(request.first) + expected : "–"],
    ["Prefill node", [request.prefill || "the decode node itself", request.choice?.replace("_", " ")].filter(Boolean).join(", chosen as ")],
    ["Decode node", request.decode],
    ["Tried before", request.tries ? `${count(request.tries)} nodes` : ""],
    ["Moves", moves.join("; ")],
    ["KV", request.kv_bytes ? bytes(request.kv_bytes) : ""],
    ...(request.segments ?? []).filter(([, from, until]) => until > from).map(segmentFact),
  ];
  return pairs.filter(([, text]) => text);
}

function segmentFact([kind, from, until], i) {
  return [`${i + 1}. ${WORDS[kind] ?? kind}`, `${seconds(until - from)}, from ${seconds(from)}`];
}
