#!/usr/bin/env bash
# @langchain/openai 1.6.0: over the Responses API, a choice of tools that is a word is not sent.
#
# `tool_choice` "none", "any" and "required" (and "auto", the default anyway) leave the client over chat completions and
# are dropped over Responses, without an error: a model that must call answers with words, and one that must not call may.
# Only the name of a tool is sent. The API changes by itself, too: `reasoning: {summary}`, a built-in tool or a custom one
# among the tools makes ChatOpenAI use Responses. The Python package (langchain-openai 1.7.4) sends all of them.
#
# Seen on 2026-11-29 with Node.js 20 and @langchain/core 1.4.0:
#     chats: none none, any required, required required, weather function
#     Responses: none undefined, any undefined, required undefined, weather function
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type": "module"}' > package.json
npm install --silent --ignore-scripts @langchain/openai@1.6.0 @langchain/core@1.4.0 zod@4.6.7
cat > run.mjs <<'JS'
import { createServer } from "node:http";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

let asked;
const server = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  asked = JSON.parse(body);
  const message = { role: "assistant", content: "done" };
  const text = { type: "output_text", text: "done", annotations: [] };
  const item = { type: "message", id: "msg_1", role: "assistant", status: "completed", content: [text] };
  response.setHeader("content-type", "application/json");
  response.end(
    JSON.stringify({
      id: "r", model: "m", created: 1, created_at: 1, status: "completed",
      object: asked.input ? "response" : "chat.completion",
      choices: [{ index: 0, message, finish_reason: "stop" }],
      output: [item],
    }),
  );
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const weather = tool(async () => "warm", { name: "weather", description: "Weather.", schema: z.object({}) });

async function sent(useResponsesApi) {
  const model = new ChatOpenAI({
    model: "m", apiKey: "none", maxRetries: 0, useResponsesApi, configuration: { baseURL },
  });
  const found = [];
  for (const choice of ["none", "any", "required", "weather"]) {
    await model.bindTools([weather], { tool_choice: choice }).invoke("How is the weather?");
    found.push(`${choice} ${asked.tool_choice?.type ?? asked.tool_choice}`);
  }
  return found.join(", ");
}

const chats = await sent(false);
const responses = await sent(true);
server.close();
console.log(`chats: ${chats}\nResponses: ${responses}`);
const isAsSeen =
  chats === "none none, any required, required required, weather function" &&
  responses === "none undefined, any undefined, required undefined, weather function";
process.exit(isAsSeen ? 0 : 1);
JS
node run.mjs
