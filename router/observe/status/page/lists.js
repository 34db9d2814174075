// Shows what waits, whose requests they are, and what the router has counted.

import { byId, facts, setText, table } from "./dom.js";
import { clock, count, number, percent, seconds, span } from "./format.js";

const LINE = [
  { head: "Tenant", cell: (waiting) => waiting.tenant },
  { head: "Class", cell: (waiting) => waiting.priority },
  { head: "Prompt", number: true, cell: (waiting) => `≈ ${number(waiting.prompt)}` },
  { head: "Waits", number: true, cell: (waiting) => seconds(waiting.waited_s) },
];

export function showQueue(queue) {
  const refused = Object.entries(queue.refusals).filter(([, num]) => num > 0);
  facts(byId("queue"), [
    ["Waiting", count(queue.waiting)],
    ["Longest wait", queue.waiting ? seconds(queue.oldest_s) : "–"],
    ["Empty in about", queue.waiting ? span(queue.drain_s) : "–"],
    ["Slots in use", `${count(queue.started)} of ${count(queue.slots)}`],
    ...refused.map(([why, num]) => [`Refused: ${why.replaceAll("_", " ")}`, count(num)]),
  ]);
  table(byId("line"), LINE, queue.line.map((waiting, i) => ({ ...waiting, i })), ({ i }) => i);
}

const SESSIONS = [
  { head: "Session", cell: (session) => session.id },
  { head: "Requests", number: true, cell: (session) => count(session.requests) },
  { head: "Tokens", number: true, cell: (session) => number(session.tokens) },
  { head: "Prefill at", less: true, cell: (session) => session.prefill || "–" },
  { head: "Last", cell: (session) => clock(session.last_at) },
];

export function showSessions(sessions) {
  setText(
    byId("sessions-about"),
    sessions.known
      ? `${count(sessions.known)} known here; names stand for what clients call them.`
      : "None yet.",
  );
  table(byId("sessions"), SESSIONS, sessions.shown, (session) => session.id);
}

const TENANTS = [
  { head: "Tenant", cell: (tenant) => tenant.tenant },
  { head: "Req/s", number: true, cell: (tenant) => number(tenant.requests_per_s) },
  { head: "Tok/s", number: true, cell: (tenant) => number(tenant.tokens_per_s) },
  { head: "Failed", number: true, about: "Last minute", cell: (tenant) => count(tenant.failed) },
  { head: "All", number: true, cell: (tenant) => count(tenant.requests) },
  { head: "200", number: true, about: "Share of all answers", cell: share },
];

function share(tenant) {
  return tenant.requests ? percent((tenant.by_status["200"] ?? 0) / tenant.requests) : "–";
}

export function showTenants(tenants) {
  table(byId("tenants"), TENANTS, tenants, (tenant) => tenant.tenant);
}

const MODELS = [
  { head: "Model", cell: (model) => model.model },
  { head: "Version", cell: (model) => model.version },
  { head: "Waiting", number: true, cell: (model) => count(model.waiting) },
  { head: "All", number: true, cell: (model) => count(model.requests) },
  { head: "200", number: true, about: "Share of all answers", cell: share },
];

/** Where there is only one model, all figures are its. */
export function showModels(models) {
  byId("models-part").hidden = models.length < 2;
  table(byId("models"), MODELS, models, (model) => `${model.model} ${model.version}`);
}

const BATCHES = [
  { head: "Batch", cell: (batch) => batch.id.slice(0, 18) },
  { head: "Tenant", less: true, cell: (batch) => batch.tenant },
  { head: "Model", less: true, cell: (batch) => batch.model },
  { head: "Status", cell: (batch) => batch.status.replaceAll("_", " ") },
  {
    head: "Done", number: true, about: "Lines that have an answer, of all",
    cell: (batch) => `${count(batch.completed + batch.failed)} of ${count(batch.total)}`,
  },
  { head: "Failed", number: true, cell: (batch) => count(batch.failed) },
  { head: "Until", less: true, cell: (batch) => (batch.expires_at ? clock(batch.expires_at) : "–") },
];

/** Those that this router works on. */
export function showBatches(batches) {
  byId("batches-part").hidden = batches.length === 0;
  table(byId("batches"), BATCHES, batches, (batch) => batch.id);
}

export function showTotals(totals) {
  const pairs = Object.entries(totals);
  facts(byId("totals"), pairs.map(([name, value]) => [name[0].toUpperCase() + name.slice(1), count(value)]));
}
