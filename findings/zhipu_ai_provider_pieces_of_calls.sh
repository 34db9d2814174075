#!/usr/bin/env bash
# zhipu-ai-provider 0.2.2 (for the AI SDK): a streamed call ends the answer unless it comes in one piece.
#
# In OpenAI's API the first piece of a streamed call has its id and name, and later ones more of the arguments alone, as
# openai, vLLM and SGLang send them. This provider wants `id`, `type` and `function.name` in each piece: every other one is
# an AI_TypeValidationError, the tool does not run, and the answer ends behind the words in front of the call. Calls that
# come whole are run, streamed or not. `@ai-sdk/openai-compatible` reads both.
# Guessed before: that it runs the tool in both forms.
#
# Seen on 2026-11-30 with Node.js 20 and ai 6.0.326:
#     in one piece: ran 1, errors 0
#     in pieces: ran 0, errors 2
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type": "module"}' > package.json
npm install --silent --ignore-scripts zhipu-ai-provider@0.2.2 ai@6.0.326 zod@4.6.7
cat > run.mjs <<'JS'
import { createServer } from "node:http";
import { stepCountIs, streamText, tool } from "ai";
import { createZhipu } from "zhipu-ai-provider";
import { z } from "zod";

const head = { index: 0, id: "call_1", type: "function" };
const whole = [{ ...head, function: { name: "weather", arguments: '{"city": "Oslo"}' } }];
const pieces = [
  { ...head, function: { name: "weather", arguments: "" } },
  { index: 0, function: { arguments: '{"city": ' } },
  { index: 0, function: { arguments: '"Oslo"}' } },
];
let calls, asked;
const server = createServer(async (request, response) => {
  for await (const _ of request);
  asked += 1;
  const deltas = asked > 1 ? [{ content: "Rain." }] : [{ content: "I look." }, ...calls.map((one) => ({ tool_calls: [one] }))];
  response.setHeader("content-type", "text/event-stream");
  const send = (delta, finish_reason) => {
    const chunk = { id: "a", object: "chat.completion.chunk", created: 1, model: "m" };
    response.write(`data: ${JSON.stringify({ ...chunk, choices: [{ index: 0, delta, finish_reason }] })}\n\n`);
  };
  for (const delta of deltas) send({ role: "assistant", ...delta }, null);
  send({}, asked > 1 ? "stop" : "tool_calls");
  response.end("data: [DONE]\n\n");
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const zhipu = createZhipu({ apiKey: "none", baseURL: `http://127.0.0.1:${server.address().port}/v1` });
const lines = [];
for (const [name, given] of [["in one piece", whole], ["in pieces", pieces]]) {
  [calls, asked] = [given, 0];
  let ran = 0, errors = 0;
  const weather = tool({
    description: "Weather.", inputSchema: z.object({ city: z.string() }), execute: async () => { ran += 1; return "rain"; },
  });
  const answer = streamText({
    model: zhipu("m"), tools: { weather }, stopWhen: stepCountIs(3), prompt: "Weather?", maxRetries: 0,
    onError: () => { errors += 1; },
  });
  for await (const _ of answer.textStream);
  lines.push(`${name}: ran ${ran}, errors ${errors}`);
}
server.close();
console.log(lines.join("\n"));
process.exit(lines.join("\n") === "in one piece: ran 1, errors 0\nin pieces: ran 0, errors 2" ? 0 : 1);
JS
node run.mjs 2>errors || { cat errors; exit 1; }
