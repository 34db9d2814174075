#!/usr/bin/env bash
# @genkit-ai/compat-oai 1.42.0: temperature 0, `maxOutputTokens` and `toolChoice` never leave the client.
#
# The plugin deletes every field of a request that is falsy: with `temperature: 0` none is sent, so the server draws with
# its default, often 1; `seed: 0` and `parallel_tool_calls: false` go the same way. `maxOutputTokens`, Genkit's name for the
# bound of an answer, is read and thrown away (`max_tokens` in its place is sent), and `toolChoice` is not read, though the
# model may say that it supports it. There is no error: answers that should repeat differ, tools that must be called are not,
# and a model that does not end fills its context.
#
# Seen on 2026-11-29 with Node.js 20 and genkit 1.42.0:
#     temperature 0: top_p 0.9
#     temperature 0.5: temperature 0.5, top_p 0.9
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type": "module"}' > package.json
npm install --silent --ignore-scripts genkit@1.42.0 @genkit-ai/compat-oai@1.42.0
cat > run.mjs <<'JS'
import { createServer } from "node:http";
import { compatOaiModelRef, defineCompatOpenAIModel, openAICompatible } from "@genkit-ai/compat-oai";
import { genkit, z } from "genkit";

const message = { role: "assistant", content: "done" };
let asked;
const server = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  asked = JSON.parse(body);
  response.setHeader("content-type", "application/json");
  response.end(
    JSON.stringify({
      id: "c", object: "chat.completion", created: 1, model: "m",
      choices: [{ index: 0, message, finish_reason: "stop" }],
    }),
  );
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const info = { supports: { multiturn: true, tools: true, toolChoice: true } };
const own = openAICompatible({
  name: "own",
  apiKey: "none",
  baseURL: `http://127.0.0.1:${server.address().port}/v1`,
  initializer: async (client) => [
    defineCompatOpenAIModel({
      name: "own/m",
      client,
      pluginOptions: { name: "own" },
      modelRef: compatOaiModelRef({ name: "own/m", info }),
    }),
  ],
});
const ai = genkit({ plugins: [own] });
const schema = { inputSchema: z.object({}), outputSchema: z.string() };
const weather = ai.defineTool({ name: "weather", description: "Weather.", ...schema }, async () => "warm");

const lines = [];
for (const temperature of [0, 0.5]) {
  await ai.generate({
    model: "own/m",
    prompt: "How is the weather?",
    tools: [weather],
    toolChoice: "required",
    config: { temperature, topP: 0.9, maxOutputTokens: 20, seed: 0, parallel_tool_calls: false },
  });
  const { model, messages, tools, ...rest } = asked;
  const fields = Object.entries(rest).map(([name, value]) => `${name} ${value}`);
  lines.push(`temperature ${temperature}: ${fields.join(", ")}`);
}
server.close();
console.log(lines.join("\n"));
const isAsSeen =
  lines[0] === "temperature 0: top_p 0.9" && lines[1] === "temperature 0.5: temperature 0.5, top_p 0.9";
process.exit(isAsSeen ? 0 : 1);
JS
GENKIT_ENV=prod node run.mjs
