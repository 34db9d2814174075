#!/usr/bin/env bash
# Grok Build 1.0.41 (@xai-official/grok): over the Messages API it asks for 128,000 tokens, whatever `context_window` says.
#
# A model of one's own has `context_window = 131072` in config.toml. Over chats and Responses the agent asks for no number of
# tokens, and gets what is left. With `api_backend = "messages"`, whose requests need one, it asks for 128,000: servers
# that refuse an answer which cannot fit behind its prompt, as vLLM does, refuse all turns, and the agent ends with their
# sentence. `max_completion_tokens` must be set, too.
#
# Seen on 2026-11-29 with Node.js 20 on Linux, x86-64, for a context of 131,072:
#     chat_completions: none
#     responses: none
#     messages: 128000
#     messages, max_completion_tokens = 8192: 8192
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
let most;
const server = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  const asked = request.method === "POST" ? JSON.parse(body) : {};
  if (asked.model === "own") {
    most ??= asked.max_tokens ?? asked.max_completion_tokens ?? asked.max_output_tokens ?? "none";
  }
  // What it would have answered is of no matter: the turn ends with the first request.
  response.statusCode = request.url.endsWith("/models") ? 200 : 400;
  const error = { message: "no more", type: "invalid_request_error" };
  response.end(JSON.stringify({ object: "list", data: [{ id: "own", object: "model" }], type: "error", error }));
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const url = `http://127.0.0.1:${server.address().port}/v1`;
mkdirSync("home/.grok", { recursive: true });
mkdirSync("work");
const home = `${process.cwd()}/home`;
const env = { PATH: process.env.PATH, HOME: home, GROK_HOME: `${home}/.grok`, XAI_API_KEY: "none" };

async function asks(backend, more = "") {
  const model = `model = "own"\nbase_url = "${url}"\ncontext_window = 131072\napi_backend = "${backend}"\n${more}\n`;
  writeFileSync(
    "home/.grok/config.toml",
    `[models]\ndefault = "own"\n[model.own]\n${model}[endpoints]\nmodels_base_url = "${url}"\n`,
  );
  most = undefined;
  const words = ["-p", "Hello", "-m", "own", "--always-approve", "--disable-web-search"];
  const agent = spawn("../grok", words, { cwd: "work", env, stdio: "ignore", timeout: 120_000 });
  await new Promise((ended) => agent.on("exit", ended));
  return `${backend}${more && `, ${more}`}: ${most}`;
}

const lines = [];
for (const backend of ["chat_completions", "responses", "messages"]) lines.push(await asks(backend));
lines.push(await asks("messages", "max_completion_tokens = 8192"));
server.close();
console.log(lines.join("\n"));
const seen =
  "chat_completions: none|responses: none|messages: 128000|messages, max_completion_tokens = 8192: 8192";
process.exit(lines.join("|") === seen ? 0 : 1);
JS
node run.mjs
