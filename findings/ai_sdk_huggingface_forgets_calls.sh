#!/usr/bin/env bash
# @ai-sdk/huggingface 2.0.48: tools run, and what they return never reaches the model.
#
# The provider speaks the Responses API. Calls of an answer are run by the AI SDK, but the next request has neither the
# `function_call` nor its output, only the words beside the call: the model sees nothing of what it did and calls again,
# until `stopWhen` ends the loop. The SDK logs 'The feature "tool messages" is not supported' and goes on.
# `@ai-sdk/openai` sends both, and so does `@ai-sdk/openai-compatible` over chats.
# Guessed before: that the loop ends at the second answer, as with the other providers.
#
# Seen on 2026-11-30 with Node.js 20 and ai 7.0.173:
#     ran 3 of 3 steps
#     sent back: user assistant
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type": "module"}' > package.json
npm install --silent --ignore-scripts @ai-sdk/huggingface@2.0.48 ai@7.0.173 zod@4.6.7
cat > run.mjs <<'JS'
import { createServer } from "node:http";
import { createHuggingFace } from "@ai-sdk/huggingface";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const words = { type: "output_text", text: "I look.", annotations: [] };
const message = { type: "message", id: "msg_1", role: "assistant", status: "completed", content: [words] };
const call = {
  type: "function_call", id: "fc_1", call_id: "call_1", name: "weather", arguments: "{}", status: "completed",
};
const done = { ...message, content: [{ ...words, text: "Rain." }] };
const asked = [];
const server = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  asked.push(JSON.parse(body));
  const hasResult = asked.at(-1).input.some(({ type }) => type === "function_call_output");
  const usage = { input_tokens: 1, output_tokens: 1, total_tokens: 2 };
  const settings = {
    instructions: null, max_output_tokens: null, metadata: {}, tool_choice: "auto", tools: [], temperature: 1, top_p: 1,
  };
  const answer = { id: "resp_1", object: "response", created_at: 1, model: "m", status: "completed", usage, ...settings };
  response.setHeader("content-type", "application/json");
  response.end(JSON.stringify({ ...answer, error: null, output: hasResult ? [done] : [message, call] }));
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const huggingface = createHuggingFace({ apiKey: "none", baseURL: `http://127.0.0.1:${server.address().port}/v1` });
let ran = 0;
const weather = tool({ description: "Weather.", inputSchema: z.object({}), execute: async () => { ran += 1; return "rain"; } });
await generateText({
  model: huggingface("m"), tools: { weather }, stopWhen: stepCountIs(3), prompt: "Weather?", maxRetries: 0,
});
server.close();
const kinds = asked[1].input.map(({ type, role }) => type ?? role).join(" ");
const lines = [`ran ${ran} of ${asked.length} steps`, `sent back: ${kinds}`];
console.log(lines.join("\n"));
process.exit(lines.join("\n") === "ran 3 of 3 steps\nsent back: user assistant" ? 0 : 1);
JS
node run.mjs 2>errors || { cat errors; exit 1; }
