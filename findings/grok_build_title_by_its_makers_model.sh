#!/usr/bin/env bash
# Grok Build 1.0.41 (@xai-official/grok): each session begins with a request for a model that is not configured.
#
# With a model of one's own as the default (`[models] default`, `[endpoints] models_base_url`) the agent's turns go where they
# should, with the API that `api_backend` names. The title of the session does not: it is asked of `grok-4.6` by
# POST /v1/responses, whatever `api_backend` says, at the same server, and the key goes with it. That is a 404 a session
# on servers that check names; on one that takes any name it is an answer of 100 tokens with a forced call. It has the
# session's headers, empty: `x-grok-session-id` and `x-grok-conv-id` are "". The agent works without it.
#
# Seen on 2026-11-29 with Node.js 20 on Linux, x86-64:
#     POST /v1/responses grok-4.6 session_title, conversation ""
#     POST /v1/chat/completions own, a conversation
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --ignore-scripts @xai-official/grok-linux-x64@1.0.41
cat > run.mjs <<'JS'
import { spawn } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { brotliDecompressSync } from "node:zlib";

const packed = readFileSync("node_modules/@xai-official/grok-linux-x64/bin/grok.br");
writeFileSync("grok", brotliDecompressSync(packed), { mode: 0o755 });
const asked = new Set();
const server = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  if (request.method !== "POST") {
    response.statusCode = request.url.endsWith("/models") ? 200 : 404;
    response.end('{"object": "list", "data": [{"id": "own", "object": "model"}]}');
    return;
  }
  const { model, tool_choice: choice } = JSON.parse(body);
  const name = request.headers["x-grok-conv-id"];
  const words = [request.method, request.url, model, ...(choice?.name ? [choice.name] : [])];
  asked.add(`${words.join(" ")}, ${name ? "a conversation" : 'conversation ""'}`);
  if (model !== "own") {
    response.statusCode = 404;
    response.end('{"error": {"message": "no such model", "type": "invalid_request_error"}}');
    return;
  }
  const head = { id: "c", object: "chat.completion.chunk", created: 1, model };
  const deltas = [[{ role: "assistant", content: "done" }, null], [{}, "stop"]];
  response.setHeader("content-type", "text/event-stream");
  for (const [delta, end] of deltas) {
    response.write(`data: ${JSON.stringify({ ...head, choices: [{ index: 0, delta, finish_reason: end }] })}\n\n`);
  }
  response.end("data: [DONE]\n\n");
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const url = `http://127.0.0.1:${server.address().port}/v1`;
mkdirSync("home/.grok", { recursive: true });
mkdirSync("work");
writeFileSync(
  "home/.grok/config.toml",
  `[models]\ndefault = "own"\n[model.own]\nmodel = "own"\nbase_url = "${url}"\n` +
    `api_backend = "chat_completions"\n[endpoints]\nmodels_base_url = "${url}"\n`,
);
const home = `${process.cwd()}/home`;
const agent = spawn("../grok", ["-p", "Hello", "-m", "own", "--always-approve", "--disable-web-search"], {
  cwd: "work",
  env: { PATH: process.env.PATH, HOME: home, GROK_HOME: `${home}/.grok`, XAI_API_KEY: "none" },
  stdio: "ignore",
  timeout: 120_000,
});
const code = await new Promise((ended) => agent.on("exit", ended));
server.close();
const lines = [...asked].sort().reverse();
console.log(lines.join("\n"));
const isAsSeen =
  lines.join("\n") ===
  'POST /v1/responses grok-4.6 session_title, conversation ""\nPOST /v1/chat/completions own, a conversation';
process.exit(code === 0 && isAsSeen ? 0 : 1);
JS
node run.mjs
