// The status page: takes what the router streams, and shows it.

import { byId, setAttribute, setClass, setText } from "./dom.js";
import { count, span } from "./format.js";
import { showBatches, showModels, showQueue, showSessions, showTenants, showTotals } from "./lists.js";
import { byAddress, NodeView } from "./node_view.js";
import { stateClass } from "./nodes.js";
import { Requests } from "./requests.js";
import { Stream } from "./stream.js";
import { showPath, showTiles } from "./totals.js";

const state = { nodes: new Map() };
const requests = new Requests();
const nodeView = new NodeView();

function take(data) {
  const { nodes, open, ended, ...sections } = data;
  Object.assign(state, sections);
  if (data.full) state.nodes.clear();
  for (const node of nodes ?? []) state.nodes.set(`${node.tier} ${node.node}`, node);
  const names = new Set(state.names);
  for (const name of state.nodes.keys()) if (!names.has(name)) state.nodes.delete(name);
  show(data, nodes !== undefined || data.names !== undefined);
  requests.take(data);
}

function show(data, nodesChanged) {
  const nodes = Array.from(state.nodes.values()).sort(byAddress);
  showHead(nodes);
  showTiles(byId("tiles"), state);
  showPath(byId("path"), state, nodes);
  if (nodesChanged || data.router) nodeView.take(nodes, state.router.version);
  if (data.queue) showQueue(state.queue);
  if (data.sessions) showSessions(state.sessions);
  if (data.tenants) showTenants(state.tenants);
  if (data.models) showModels(state.models);
  if (data.batches) showBatches(state.batches);
  if (data.totals) showTotals(state.totals);
}

function showHead(nodes) {
  const { models, version, state: word, started_at: startedAt } = state.router;
  const about = [
    models.join(", "), `version ${version}`, `${count(nodes.length)} nodes`, `up ${span(state.now - startedAt)}`,
  ];
  setText(byId("about"), about.filter(Boolean).join(" · "));
  setText(byId("state"), word);
  setClass(byId("state"), stateClass(word));
  document.title = word === "ready" ? "tandem" : `tandem: ${word}`;
}

function health({ ageMs, isStale, isPaused }) {
  const banner = byId("banner");
  const isKnown = state.router !== undefined;
  setClass(document.body, isStale ? "stale" : isPaused ? "paused" : "");
  setText(byId("live-text"), isPaused ? "paused" : isStale ? `${span(ageMs / 1000)} old` : isKnown ? "live" : "connecting");
  if (isStale && banner.hidden) {
    const shown = isKnown ? "What you see is from " + new Date(1000 * state.now).toLocaleTimeString("en-GB") + "." : "";
    setText(banner, `The router does not answer. ${shown} Trying to connect again.`);
  }
  banner.hidden = !isStale;
}

const stream = new Stream("status/events", take, health);
const button = byId("pause");
button.addEventListener("click", () => {
  const isPaused = !stream.isPaused;
  stream.pause(isPaused);
  setAttribute(button, "aria-pressed", isPaused);
  setText(button, isPaused ? "Resume" : "Pause");
});
