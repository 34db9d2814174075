// Shows the cluster as a whole: a tile for each figure, and the path that requests take.

import { element, keep, setAttribute, setClass, setText } from "./dom.js";
import { bytes, count, number, percent, seconds } from "./format.js";
import { drawSpark, spark } from "./spark.js";

const perSecond = (value) => `${number(value)}/s`;
const p50 = (quantiles) => (quantiles.n ? seconds(quantiles.p50) : "–");
const p99 = (quantiles) => (quantiles.n ? `p99 ${seconds(quantiles.p99)}` : "none yet");

const TILES = [
  {
    name: "Running", curve: "running", write: count,
    value: (c) => count(c.running),
    more: (c) => `${number(c.requests_per_s)} requests/s here`,
  },
  {
    name: "Waiting", curve: "waiting", write: count,
    value: (c) => count(c.waiting),
    more: (c, s) => `${count(s.queue.waiting)} in the queue here`,
  },
  {
    name: "Tokens out", curve: "tokens_out", write: perSecond,
    value: (c) => perSecond(c.tokens_out_per_s),
    more: () => "generated",
  },
  {
    name: "Tokens in", curve: "tokens_in", write: perSecond,
    value: (c) => perSecond(c.tokens_in_per_s),
    more: () => "of prompts",
  },
  {
    name: "First token", curve: "ttft", write: seconds, about: "Time to first token (TTFT), median",
    value: (c) => p50(c.ttft), more: (c) => p99(c.ttft),
  },
  {
    name: "Between tokens", curve: "itl", write: seconds,
    about: "Time between pieces of a stream (ITL), median",
    value: (c) => p50(c.itl), more: (c) => p99(c.itl),
  },
  {
    name: "Queue time", curve: "queue", write: seconds, about: "Until a prompt is begun, median",
    value: (c) => p50(c.queue), more: (c) => p99(c.queue),
  },
  {
    name: "Errors", curve: "failed", write: percent,
    about: "Answers of 5xx, and those that broke off; 429 is counted apart, as over limits",
    value: (c) => (c.requests ? percent(c.failed / c.requests) : "–"),
    more: (c) => `${count(c.failed)} of ${count(c.requests)}, ${count(c.limited)} over limits`,
    isBad: (c) => c.failed > 0,
  },
];

/** Writes a figure with its unit, which is smaller. */
function setFigure(target, text) {
  if (!target.firstChild) target.append(element("span"), element("span", "unit"));
  const [, figure, unit] = /^([\d.,–]*[kMGT]?)(.*)$/.exec(text);
  setText(target.firstChild, figure);
  setText(target.lastChild, unit);
}

export function showTiles(target, state) {
  const make = (tile) => {
    const made = element(
      "li", "tile", element("h3", "", tile.name), element("p", "value"), element("p", "more"), spark(),
    );
    if (tile.about) made.title = tile.about;
    return made;
  };
  keep(target, TILES, (tile) => tile.name, make, (made, tile) => {
    const [, value, more, curve] = made.children;
    setFigure(value, tile.value(state.cluster, state));
    setText(more, tile.more(state.cluster, state));
    setClass(made, tile.isBad?.(state.cluster) ? "tile bad" : "tile");
    drawSpark(curve, state.curves[tile.curve], state.curves.slots, tile.write);
  });
}

const sum = (nodes, name) => nodes.reduce((total, node) => total + (node[name] ?? 0), 0);
const ready = (nodes) => nodes.filter((node) => node.state === "ready").length;

const STAGES = [
  {
    name: "Queue", kind: "queue", value: (s) => p50(s.cluster.queue),
    lines: (s) => [
      `${count(s.queue.waiting)} of at most ${count(s.queue.limit)} waiting`,
      `${count(s.queue.started)} of ${count(s.queue.slots)} slots in use`,
    ],
  },
  {
    name: "Prefill", kind: "prefill", value: (s) => p50(s.transfers.prefill),
    lines: (s, prefill) => [
      prefill.length ? `${ready(prefill)} of ${prefill.length} nodes ready` : "on the decode nodes",
      `${perSecond(s.cluster.tokens_in_per_s)} tokens`,
    ],
  },
  {
    name: "Transfer", kind: "transfer", value: (s) => p50(s.transfers.transfer),
    lines: (s) => [
      `${count(s.transfers.receiving)} under way, ${count(s.transfers.held)} held`,
      `${bytes(s.transfers.bytes_per_s)}/s of KV`,
    ],
  },
  {
    name: "Join", kind: "join", value: (s) => p50(s.transfers.join),
    about: "KV and first token are here until the second token",
    lines: (s) => [p99(s.transfers.join), `${count(s.cluster.moves)} moved answers`],
  },
  {
    name: "Decode", kind: "decode", value: (s) => p50(s.cluster.itl),
    lines: (s, prefill, decode) => [
      `${ready(decode)} of ${decode.length} nodes ready`,
      `${count(sum(decode, "running"))} running, ${perSecond(s.cluster.tokens_out_per_s)} tokens`,
    ],
  },
];
const MEANINGS = {
  queue: "waits", prefill: "computes the prompt", transfer: "moves KV, layer by layer",
  join: "until the second token", decode: "between tokens",
};

export function showPath(target, state, nodes) {
  const prefill = nodes.filter((node) => node.tier === "prefill");
  const decode = nodes.filter((node) => node.tier === "decode");
  const make = (stage) => {
    const made = element(
      "li", `stage ${stage.kind}`, element("h3", "", stage.name), element("p", "value"),
      element("p", "meaning", MEANINGS[stage.kind]), element("p", "more"), element("p", "more"),
    );
    setAttribute(made, "title", stage.about ?? `${stage.name}, median of the last minute`);
    return made;
  };
  keep(target, STAGES, (stage) => stage.kind, make, (made, stage) => {
    const [, value, , first, second] = made.children;
    const [one, two] = stage.lines(state, prefill, decode);
    setFigure(value, stage.value(state));
    setText(first, one);
    setText(second, two);
  });
}
