#!/usr/bin/env bash
# @anthropic-ai/sdk 1.14.0: with a server that ignores fields which it does not know, the tool runner loses the
# conversation.
#
# `client.beta.messages.toolRunner()` adds `thread: {"type": "create"}` to its first request, whatever its base URL is.
# An answer that says nothing of a thread counts as one that began it: the second request has the result of the tool
# alone, and neither the user's words nor the call. The model answers something, and nobody sees an error. Servers have
# to refuse the field (400, `details.error_code` "thread_unsupported_request"): the runner sends all turns then. The
# client can say `thread: false`.
#
# Seen on 2026-11-28 with Node.js 20:
#     first: user (thread create)
#     second: tool_result (thread continue)
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type": "module"}' > package.json
npm install --silent --ignore-scripts @anthropic-ai/sdk@1.14.0
cat > run.mjs <<'JS'
import { createServer } from "node:http";
import Anthropic from "@anthropic-ai/sdk";

const call = { type: "tool_use", id: "toolu_1", name: "weather", input: {} };
const asked = [];
const server = createServer(async (request, response) => {
  let text = "";
  for await (const part of request) text += part;
  asked.push(JSON.parse(text));
  const isFirst = asked.length === 1;
  response.setHeader("content-type", "application/json");
  response.end(
    JSON.stringify({
      id: `msg_${asked.length}`,
      type: "message",
      role: "assistant",
      model: "m",
      content: isFirst ? [call] : [{ type: "text", text: "done" }],
      stop_reason: isFirst ? "tool_use" : "end_turn",
      stop_sequence: null,
      usage: { input_tokens: 1, output_tokens: 1 },
    }),
  );
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const client = new Anthropic({
  baseURL: `http://127.0.0.1:${server.address().port}`,
  apiKey: "none",
  maxRetries: 0,
});
await client.beta.messages.toolRunner({
  model: "m",
  max_tokens: 10,
  messages: [{ role: "user", content: "How is the weather?" }],
  tools: [{ name: "weather", input_schema: { type: "object" }, run: () => "rain", parse: (x) => x }],
});
server.close();
const told = asked.map(({ messages, thread }) => {
  const said = messages.map((m) => (Array.isArray(m.content) ? m.content[0].type : m.role));
  return `${said.join(", ")} (thread ${thread?.type})`;
});
console.log(`first: ${told[0]}\nsecond: ${told[1]}`);
const isAsSeen =
  told[0] === "user (thread create)" && told[1] === "tool_result (thread continue)";
process.exit(isAsSeen ? 0 : 1);
JS
node run.mjs
