#!/usr/bin/env bash
# @tanstack/ai-openai 0.23.1: over the Responses API, what the model said before a call is sent back behind it.
#
# A turn in which the model says a word and calls a tool is a `message` and a `function_call` in the answer. In the next
# request the adapter sends the call first, then the message, then the result: the message stands between a call and its
# output. A server that makes turns of items in their order has two turns of the assistant, and a result that no longer
# follows its call; strict chat templates refuse both, and the cached prefix ends in front of the call. Over
# chat completions (`createOpenaiChatCompletions`) the turn is one message, as it was.
#
# Seen on 2026-11-29 with Node.js 20, @tanstack/ai 0.58.0 and openai 6.49.0:
#     answered: reasoning message function_call
#     sent back: reasoning function_call message function_call_output
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type": "module"}' > package.json
npm install --silent --ignore-scripts @tanstack/ai@0.58.0 @tanstack/ai-openai@0.23.1 openai@6.49.0 zod@4.6.7
cat > run.mjs <<'JS'
import { createServer } from "node:http";
import { chat, toolDefinition } from "@tanstack/ai";
import { createOpenaiChat } from "@tanstack/ai-openai";
import { z } from "zod";

const thought = { type: "reasoning", id: "rs_1", summary: [], content: [{ type: "reasoning_text", text: "Where?" }] };
const words = { type: "output_text", text: "I look first.", annotations: [] };
const message = { type: "message", id: "msg_1", role: "assistant", status: "completed", content: [words] };
const call = {
  type: "function_call", id: "fc_1", call_id: "call_1", name: "weather", arguments: "{}", status: "completed",
};
const done = { ...message, content: [{ ...words, text: "Warm." }] };

/** Yields the events of an answer. */
function* events(output) {
  const response = { id: "resp_1", object: "response", created_at: 1, model: "m", status: "in_progress", output: [] };
  yield { type: "response.created", response };
  for (const [output_index, item] of output.entries()) {
    const at = { output_index, item_id: item.id, content_index: 0 };
    const isMessage = item.type === "message";
    const isCall = item.type === "function_call";
    yield { type: "response.output_item.added", output_index, item: { ...item, ...(isMessage && { content: [] }), ...(isCall && { arguments: "" }) } };
    if (isMessage) {
      yield { type: "response.content_part.added", ...at, part: { ...words, text: "" } };
      yield { type: "response.output_text.delta", ...at, delta: item.content[0].text };
      yield { type: "response.output_text.done", ...at, text: item.content[0].text };
      yield { type: "response.content_part.done", ...at, part: item.content[0] };
    }
    if (isCall) {
      yield { type: "response.function_call_arguments.delta", output_index, item_id: item.id, delta: "{}" };
      yield { type: "response.function_call_arguments.done", output_index, item_id: item.id, name: item.name, arguments: "{}" };
    }
    yield { type: "response.output_item.done", output_index, item };
  }
  const usage = { input_tokens: 1, output_tokens: 1, total_tokens: 2 };
  yield { type: "response.completed", response: { ...response, status: "completed", output, usage } };
}

const asked = [];
const server = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  asked.push(JSON.parse(body));
  const output = asked.length === 1 ? [thought, message, call] : [done];
  response.setHeader("content-type", "text/event-stream");
  let sequence_number = 0;
  for (const event of events(output)) {
    response.write(`event: ${event.type}\ndata: ${JSON.stringify({ ...event, sequence_number: sequence_number++ })}\n\n`);
  }
  response.end();
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const adapter = createOpenaiChat("m", "none", { baseURL: `http://127.0.0.1:${server.address().port}/v1` });
const weather = toolDefinition({ name: "weather", description: "Weather.", inputSchema: z.object({}) });
const tools = [weather.server(async () => "warm")];
for await (const chunk of chat({ adapter, messages: [{ role: "user", content: "Weather?" }], tools })) void chunk;
server.close();
const kinds = (items) => items.map(({ type }) => type).join(" ");
const lines = [`answered: ${kinds([thought, message, call])}`, `sent back: ${kinds(asked[1].input.slice(1))}`];
console.log(lines.join("\n"));
const seen = "answered: reasoning message function_call\nsent back: reasoning function_call message function_call_output";
process.exit(lines.join("\n") === seen ? 0 : 1);
JS
node run.mjs
