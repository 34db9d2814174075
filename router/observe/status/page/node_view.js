// Chooses which nodes are shown, and in what order: the worst first, unless somebody wants another.

import { byId, choice, element, setText } from "./dom.js";
import { narrow } from "./fold.js";
import { count, percent, seconds } from "./format.js";
import { showNodes, stateClass } from "./nodes.js";

const FEW = { wide: 10, narrow: 3 };
const FULL_KV = 0.9;
const LONG_BACKLOG_S = 10;
const TIERS = ["prefill", "decode"];

/** 3: it does not serve; 2: in doubt, or on its way out; 1: full, or far behind; 0: nothing is wrong. */
export function badness(node) {
  if (stateClass(node.state) === "pill bad") return 3;
  if (node.state !== "ready" || node.late_s) return 2;
  return node.kv > FULL_KV || node.backlog_s > LONG_BACKLOG_S ? 1 : 0;
}

const FILTERS = {
  All: () => true,
  Unwell: (node) => badness(node) > 0,
  Prefill: (node) => node.tier === "prefill",
  Decode: (node) => node.tier === "decode",
};
const most = (name) => (a, b) => (b[name] ?? -1) - (a[name] ?? -1);
const ORDERS = {
  "Worst first": (a, b) => badness(b) - badness(a),
  Address: () => 0,
  "KV in use": most("kv"),
  Running: most("running"),
  Waiting: most("waiting"),
  Backlog: most("backlog_s"),
  "Tokens in": most("tokens_in_per_s"),
  "Tokens out": most("tokens_out_per_s"),
  Sessions: most("sessions"),
};

export function byAddress(a, b) {
  const tier = TIERS.indexOf(a.tier) - TIERS.indexOf(b.tier);
  return tier || a.node.localeCompare(b.node, "en", { numeric: true });
}

const words = (node) => [node.node, node.host, node.model, node.state, node.version].join(" ").toLowerCase();

export class NodeView {
  constructor() {
    this.nodes = [];
    this.version = "";
    this.filter = "All";
    this.hasAll = false;
    choice(byId("node-filter"), Object.keys(FILTERS), (name) => this.#change("filter", name));
    byId("node-order").append(...Object.keys(ORDERS).map((name) => element("option", "", name)));
    byId("node-order").addEventListener("change", () => this.#show());
    byId("node-search").addEventListener("input", () => this.#show());
    byId("node-more").addEventListener("click", () => this.#change("hasAll", !this.hasAll));
    narrow.addEventListener("change", () => this.#show());
  }

  /** `nodes` are in the order of their addresses; `version` is the router's. */
  take(nodes, version) {
    this.nodes = nodes;
    this.version = version;
    this.#show();
  }

  #change(name, value) {
    this[name] = value;
    this.#show();
  }

  #show() {
    const asked = byId("node-search").value.trim().toLowerCase();
    const found = this.nodes.filter((node) => FILTERS[this.filter](node) && words(node).includes(asked));
    found.sort(ORDERS[byId("node-order").value]);
    const few = narrow.matches ? FEW.narrow : FEW.wide;
    showNodes(this.hasAll ? found : found.slice(0, few), this.version);
    setText(byId("node-sum"), summary(this.nodes));
    byId("node-none").hidden = found.length > 0 || this.nodes.length === 0;
    byId("node-more").hidden = found.length <= few;
    setText(byId("node-more"), this.hasAll ? "Show fewer" : `Show all ${count(found.length)} nodes`);
  }
}

/** "500: 488 ready, 12 down · fullest KV 97 % at decode-7 · longest backlog 3 s at prefill-2" */
function summary(nodes) {
  const states = new Map();
  for (const { state } of nodes) states.set(state, (states.get(state) ?? 0) + 1);
  const counts = Array.from(states).sort((a, b) => b[1] - a[1]).map(([state, num]) => `${count(num)} ${state}`);
  const parts = [`${count(nodes.length)}: ${counts.join(", ")}`];
  for (const [name, what, write] of [["kv", "fullest KV", percent], ["backlog_s", "longest backlog", seconds]]) {
    const worst = nodes.reduce((a, b) => ((b[name] ?? 0) > (a?.[name] ?? 0) ? b : a), null);
    if (worst) parts.push(`${what} ${write(worst[name])} at ${worst.host || worst.node}`);
  }
  return nodes.length ? parts.join(" · ") : "None.";
}
