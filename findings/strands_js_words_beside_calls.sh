#!/usr/bin/env bash
# @strands-agents/sdk 1.16.0 (JavaScript): over chat completions, what a model says before a call is lost with its thoughts.
#
# The agent streams. A turn in which the model thinks, says a word and calls a tool is in the next request with the call
# alone and an empty `content`; the agent's own history has no more of it. So the model does not see why it called, and a
# server's cached prefix ends at the turn that it has just made. Over the Responses API (`api: "responses"`) the words come
# back. The Python package (strands-agents 1.62.0) keeps the words over chats, and says in its log that it drops thoughts.
#
# Seen on 2026-11-29 with Node.js 20 and openai 6.49.0:
#     said: "I look first." and weather({})
#     sent back: content "", reasoning_content undefined, 1 call
#     the agent's history: toolUseBlock
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type": "module"}' > package.json
npm install --silent --ignore-scripts --legacy-peer-deps @strands-agents/sdk@1.16.0 openai@6.49.0 zod@4.6.7 \
    @modelcontextprotocol/sdk@1 @opentelemetry/api@1
cat > run.mjs <<'JS'
import { createServer } from "node:http";
import { Agent, tool } from "@strands-agents/sdk";
import { OpenAIModel } from "@strands-agents/sdk/models/openai";
import { z } from "zod";

const asked = [];
const server = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  asked.push(JSON.parse(body));
  const call = { index: 0, id: "call_1", type: "function", function: { name: "weather", arguments: "{}" } };
  const deltas = [[{ role: "assistant", reasoning_content: "Where?" }, null], [{ content: "I look first." }, null]];
  if (asked.length === 1) deltas.push([{ tool_calls: [call] }, null]);
  deltas.push([{}, asked.length === 1 ? "tool_calls" : "stop"]);
  const head = { id: "c", object: "chat.completion.chunk", created: 1, model: "m" };
  response.setHeader("content-type", "text/event-stream");
  for (const [delta, end] of deltas) {
    response.write(`data: ${JSON.stringify({ ...head, choices: [{ index: 0, delta, finish_reason: end }] })}\n\n`);
  }
  response.end("data: [DONE]\n\n");
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const clientConfig = { baseURL: `http://127.0.0.1:${server.address().port}/v1` };
const model = new OpenAIModel({ api: "chat", modelId: "m", apiKey: "none", clientConfig });
const weather = tool({ name: "weather", description: "Weather.", inputSchema: z.object({}), callback: () => "warm" });
const agent = new Agent({ model, tools: [weather], printer: false });
await agent.invoke("Weather?");
server.close();
const sent = asked[1].messages.find(({ role }) => role === "assistant");
const kept = agent.messages.find(({ role }) => role === "assistant").content.map(({ type }) => type);
const lines = [
  'said: "I look first." and weather({})',
  `sent back: content "${sent.content}", reasoning_content ${sent.reasoning_content}, ${sent.tool_calls.length} call`,
  `the agent's history: ${kept.join(" ")}`,
];
console.log(lines.join("\n"));
const isAsSeen =
  lines[1] === 'sent back: content "", reasoning_content undefined, 1 call' &&
  lines[2] === "the agent's history: toolUseBlock";
process.exit(isAsSeen ? 0 : 1);
JS
node run.mjs
