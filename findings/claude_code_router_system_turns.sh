#!/usr/bin/env bash
# claude-code-router 2.0.0, the newest for Node.js 20: what Claude Code says in turns of the system is left out, and adaptive
# thinking becomes none.
#
# Claude Code 2.1 tells the model its folder, its skills and the date in a turn of the role `system` behind the user's first
# words (beta of mid-conversation system turns). The router makes a chat of each request and drops such turns, without an
# error or a warning: the model does not know where it works. `thinking: {"type": "adaptive"}`, Claude Code's default, leaves
# it as `reasoning: {"enabled": false}`. A server that has /v1/messages itself needs no router in between.
#
# Seen on 2026-11-29 with Node.js 20:
#     sent: user, system; arrived: system (You are an agent.), user (Hello)
#     adaptive: {"effort":"high","enabled":false}
#     enabled: {"effort":"high","enabled":true}
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --ignore-scripts @musistudio/claude-code-router@2.0.0
cat > run.mjs <<'JS'
import { spawn } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";

let asked;
const upstream = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  asked = JSON.parse(body);
  const choice = { index: 0, message: { role: "assistant", content: "Yes." }, finish_reason: "stop" };
  const usage = { prompt_tokens: 1, completion_tokens: 1, total_tokens: 2 };
  response.setHeader("content-type", "application/json");
  response.end(JSON.stringify({ id: "c", object: "chat.completion", created: 1, model: "own", choices: [choice], usage }));
});
const listening = (server) => new Promise((ready) => server.listen(0, "127.0.0.1", ready));
await listening(upstream);
const free = createServer();
await listening(free);
const port = free.address().port;
await new Promise((closed) => free.close(closed));

const url = `http://127.0.0.1:${upstream.address().port}/v1/chat/completions`;
const providers = [{ name: "own", api_base_url: url, api_key: "none", models: ["m"] }];
const settings = { LOG: false, NON_INTERACTIVE_MODE: true, PORT: port, Providers: providers, Router: { default: "own,m" } };
mkdirSync("home/.claude-code-router", { recursive: true });
writeFileSync("home/.claude-code-router/config.json", JSON.stringify(settings));
const program = "node_modules/@musistudio/claude-code-router/dist/cli.js";
const env = { PATH: process.env.PATH, HOME: `${process.cwd()}/home` };
const router = spawn("node", [program, "start"], { env, stdio: "ignore" });

const text = (words) => [{ type: "text", text: words }];
async function ask(type) {
  const body = {
    model: "m",
    max_tokens: 9,
    system: text("You are an agent."),
    messages: [
      { role: "user", content: text("Hello") },
      { role: "system", content: text("# Environment: /folder") },
    ],
    thinking: type === "enabled" ? { type, budget_tokens: 9000 } : { type },
    output_config: { effort: "high" },
  };
  const request = { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" } };
  for (let left = 300; ; left--) {
    try {
      return await (await fetch(`http://127.0.0.1:${port}/v1/messages`, request)).json();
    } catch (error) {
      if (!left) throw error;
      await new Promise((later) => setTimeout(later, 100));
    }
  }
}

const said = (message) => (typeof message.content === "string" ? message.content : message.content[0].text);
const lines = [];
for (const type of ["adaptive", "enabled"]) {
  await ask(type);
  const arrived = asked.messages.map((message) => `${message.role} (${said(message)})`).join(", ");
  if (!lines.length) lines.push(`sent: user, system; arrived: ${arrived}`);
  lines.push(`${type}: ${JSON.stringify(asked.reasoning)}`);
}
router.kill("SIGKILL");
upstream.close();
console.log(lines.join("\n"));
const seen = [
  "sent: user, system; arrived: system (You are an agent.), user (Hello)",
  'adaptive: {"effort":"high","enabled":false}',
  'enabled: {"effort":"high","enabled":true}',
];
process.exit(lines.join("|") === seen.join("|") ? 0 : 1);
JS
node run.mjs
