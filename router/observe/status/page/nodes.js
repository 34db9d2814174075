// Shows nodes: a row for each.

import { byId, element, setAttribute, setClass, setText, table } from "./dom.js";
import { count, number, percent, seconds } from "./format.js";

const WORDS = { half_open: "half-open" };
const GOOD = new Set(["ready"]);
const BAD = new Set(["down", "ejected"]);

export const stateClass = (state) => {
  if (GOOD.has(state)) return "pill good";
  return BAD.has(state) || state === "no decode node" ? "pill bad" : "pill doubtful";
};

const given = (write, name) => (node) => (node[name] === undefined || node[name] === null ? "–" : write(node[name]));
const ifAny = (write, name) => (node) => (node[name] ? write(node[name]) : "–");
/** What is in the cache, and after it what came back to it: "60 %, 20 % host, 5 % disk". */
const hits = (node) => {
  const all = given(percent, "hits")(node);
  const parts = [["host_hits", "host"], ["disk_hits", "disk"]].filter(([name]) => node[name]);
  return [all, ...parts.map(([name, tier]) => `${percent(node[name])} ${tier}`)].join(", ");
};

const COLUMNS = [
  { head: "Node", fill: fillName },
  { head: "State", fill: fillState },
  { head: "KV in use", fill: fillKv },
  { head: "Running", number: true, cell: given(count, "running") },
  { head: "Waiting", number: true, cell: given(count, "waiting") },
  {
    head: "Backlog", number: true, about: "Prompt tokens to compute, at the node's speed",
    cell: ifAny(seconds, "backlog_s"),
  },
  { head: "In, tok/s", number: true, less: true, cell: given(number, "tokens_in_per_s") },
  { head: "Out, tok/s", number: true, less: true, cell: given(number, "tokens_out_per_s") },
  {
    head: "Prefix hits", number: true, less: true,
    about: "Prompt tokens that need not be computed, last 10 s; part of them: from host memory, from disk",
    cell: hits,
  },
  {
    head: "Sessions", number: true, less: true, about: "Of this router's, last ten minutes",
    cell: given(count, "sessions"),
  },
];
const DRAFTS = {
  head: "Drafts right", number: true, less: true, about: "By place in a step, last 10 s",
  cell: (node) => (node.accepted?.length ? node.accepted.map((part) => Math.round(100 * part)).join(" · ") + " %" : "–"),
};

/** Shows them in their order. `version` is the router's: another one is told. */
export function showNodes(nodes, version) {
  const drafts = nodes.some((node) => node.accepted?.length);
  const shown = nodes.map((node) => ({ ...node, isOther: node.version && node.version !== version }));
  const target = byId("nodes");
  const head = target.tHead.rows[0];
  if (head.cells.length !== COLUMNS.length + drafts) target.tBodies[0].replaceChildren();
  table(target, drafts ? [...COLUMNS, DRAFTS] : COLUMNS, shown, (node) => `${node.tier} ${node.node}`);
}

function fillName(cell, node) {
  if (!cell.firstChild) {
    cell.append(element("span", "tier"), element("span", "address"), element("span", "sub"));
  }
  const [tier, address, sub] = cell.children;
  setClass(tier, `tier ${node.tier}`);
  setText(tier, node.tier);
  setText(address, node.node);
  const other = node.isOther ? `version ${node.version}` : "";
  setText(sub, [node.host, node.model, other].filter(Boolean).join(", "));
}

function fillState(cell, node) {
  if (!cell.firstChild) cell.append(element("span"));
  const late = node.late_s ? `, silent ${node.late_s} s` : "";
  setText(cell.firstChild, (WORDS[node.state] ?? node.state) + late);
  setClass(cell.firstChild, stateClass(node.state));
}

function fillKv(cell, node) {
  if (!cell.firstChild) {
    const meter = element("span", "meter", element("span"));
    for (const [name, value] of [["role", "meter"], ["aria-valuemin", 0], ["aria-valuemax", 100], ["aria-label", "KV in use"]]) {
      setAttribute(meter, name, value);
    }
    cell.append(meter, element("span", "part"));
  }
  const [meter, text] = cell.children;
  const part = Math.round(100 * (node.kv ?? 0));
  setAttribute(meter, "aria-valuenow", part);
  setClass(meter, part > 90 ? "meter full" : "meter");
  meter.firstElementChild.style.width = `${part}%`;
  setText(text, node.kv === undefined ? "–" : percent(node.kv));
}
