#!/usr/bin/env bash
# Portkey's gateway 1.15.2, freshly installed: whole answers pass, and every stream is a 500.
#
# It adds headers of its own to the answer of the server behind it. `@hono/node-server`, of which npm takes the newest
# 1.x, has come to hand on the headers of Node's `fetch` as they are, which nothing can be added to; the gateway logs
# "TypeError: immutable" and says "Something went wrong". With 1.14.0 in `overrides` streams pass.
# Guessed before: streams pass, and fields that OpenAI's API has not (`structured_outputs`) are dropped, which they are.
#
# Seen on 2026-11-30 with Node.js 20 and hono 4.13.19:
#     @hono/node-server 1.14.0
#     stream false: 200
#     stream true: 200
#     @hono/node-server 1.19.19
#     stream false: 200
#     stream true: 500 {"status":"failure","message":"Something went wrong"}
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > run.mjs << 'JS'
import { spawn } from "node:child_process";
import { once } from "node:events";
import http from "node:http";

const answer = { id: "a", created: 1, model: "m" };
const message = { role: "assistant", content: "hi" };
const whole = { ...answer, object: "chat.completion", choices: [{ index: 0, message, finish_reason: "stop" }] };
const delta = { index: 0, delta: message, finish_reason: null };
const chunk = { ...answer, object: "chat.completion.chunk", choices: [delta] };

const server = http.createServer(async (asked, said) => {
  let body = "";
  for await (const part of asked) body += part;
  if (JSON.parse(body).stream) {
    said.setHeader("content-type", "text/event-stream");
    said.end(`data: ${JSON.stringify(chunk)}\n\ndata: [DONE]\n\n`);
  } else {
    said.setHeader("content-type", "application/json");
    said.end(JSON.stringify(whole));
  }
});
server.listen(0, "127.0.0.1");
await once(server, "listening");
const free = http.createServer().listen(0, "127.0.0.1");
await once(free, "listening");
const { port } = free.address();
free.close();
await once(free, "close");

const start = "node_modules/@portkey-ai/gateway/build/start-server.js";
const gateway = spawn(process.execPath, [start, "--headless", `--port=${port}`]);
await new Promise((done) => gateway.stdout.on("data", (text) => String(text).includes("Ready") && done()));
for (const stream of [false, true]) {
  const response = await fetch(`http://127.0.0.1:${port}/v1/chat/completions`, {
    method: "POST",
    headers: {
      "content-type": "application/json",
      authorization: "Bearer none",
      "x-portkey-provider": "openai",
      "x-portkey-custom-host": `http://127.0.0.1:${server.address().port}/v1`,
    },
    body: JSON.stringify({ model: "m", stream, messages: [{ role: "user", content: "hi" }] }),
  });
  const text = await response.text();
  console.log(`stream ${stream}: ${response.status}${response.ok ? "" : ` ${text}`}`);
}
gateway.kill();
server.close();
JS
for version in 1.14.0 1.19.19; do
  rm -rf node_modules package-lock.json
  cat > package.json << JSON
{"type": "module", "dependencies": {"@portkey-ai/gateway": "1.15.2"},
 "overrides": {"@hono/node-server": "$version", "hono": "4.13.19"}}
JSON
  npm install --silent --ignore-scripts >errors 2>&1 || { cat errors; exit 1; }
  echo "@hono/node-server $version"
  node run.mjs 2>errors || { cat errors; exit 1; }
done | tee output
diff output - << 'TEXT'
@hono/node-server 1.14.0
stream false: 200
stream true: 200
@hono/node-server 1.19.19
stream false: 200
stream true: 500 {"status":"failure","message":"Something went wrong"}
TEXT
