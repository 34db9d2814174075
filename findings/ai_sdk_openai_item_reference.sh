#!/usr/bin/env bash
# @ai-sdk/openai 4.0.118: an answer that says that it was not stored is referred to by its name.
#
# The provider's default API is Responses. Unless the caller sets `providerOptions.openai.store` to false, the second
# step of a tool loop has `{"type": "item_reference", "id": ...}` in place of what the model said, though the response
# that had this item says `"store": false`. A server that keeps nothing cannot know what is meant, so every loop in
# which the model says a word beside its call ends with an error.
#
# Seen on 2026-11-28 with Node.js 20 and ai 7.0.173:
#     store of the answer: false
#     second input: user, item_reference, function_call, function_call_output
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type": "module"}' > package.json
npm install --silent --ignore-scripts ai@7.0.173 @ai-sdk/openai@4.0.118 zod@4.6.7
cat > run.mjs <<'JS'
import { createServer } from "node:http";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const text = { type: "output_text", text: "I look.", annotations: [] };
const said = { type: "message", id: "msg_1", role: "assistant", status: "completed", content: [text] };
const call = {
  type: "function_call", id: "fc_1", call_id: "call_1", name: "weather", arguments: "{}",
  status: "completed",
};
const store = false;
const asked = [];
const server = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  asked.push(JSON.parse(body));
  response.setHeader("content-type", "application/json");
  response.end(
    JSON.stringify({
      id: `resp_${asked.length}`,
      object: "response",
      created_at: 1,
      status: "completed",
      error: null,
      incomplete_details: null,
      model: "m",
      store,
      output: asked.length === 1 ? [said, call] : [said],
      usage: { input_tokens: 1, output_tokens: 1, total_tokens: 2 },
    }),
  );
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const openai = createOpenAI({
  baseURL: `http://127.0.0.1:${server.address().port}/v1`,
  apiKey: "none",
});
const weather = tool({ inputSchema: z.object({}), execute: async () => "rain" });
await generateText({
  model: openai("m"),
  prompt: "How is the weather?",
  tools: { weather },
  stopWhen: stepCountIs(2),
  maxRetries: 0,
});
server.close();
const second = asked[1].input.map((item) => item.type ?? item.role).join(", ");
console.log(`store of the answer: ${store}\nsecond input: ${second}`);
process.exit(second === "user, item_reference, function_call, function_call_output" ? 0 : 1);
JS
node run.mjs
