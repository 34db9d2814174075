#!/usr/bin/env bash
# LlamaIndex.TS 0.12.1 (@llamaindex/openai 0.4.22): with a model of one's own a chat forgets all but its last 768 tokens.
#
# The context of a model is looked up by its name in a list of OpenAI's. A name that is not in it counts as one of 1,024
# tokens, whatever the server at `baseURL` says in /v1/models. Memories keep three quarters of that: of a conversation with 300
# tokens a turn, the third question is sent without the first two, without an error or a warning. A memory's `tokenLimit`
# is not asked where a model is there. No setting of the model changes it; a `metadata` of one's own does.
#
# Seen on 2026-11-29 with Node.js 20:
#     contextWindow: 1024
#     third request: user 2
#     third request, tokenLimit 30000: user 2
#     third request, metadata of one's own: user 0, user 1, user 2
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm install --silent --ignore-scripts llamaindex@0.12.1 @llamaindex/openai@0.4.22
cat > run.mjs <<'JS'
import { OpenAI } from "@llamaindex/openai";
import { createMemory, SimpleChatEngine } from "llamaindex";
import { createServer } from "node:http";

let asked;
const server = createServer(async (request, response) => {
  let body = "";
  for await (const part of request) body += part;
  asked = JSON.parse(body).messages;
  const choice = { index: 0, message: { role: "assistant", content: "Yes." }, finish_reason: "stop" };
  const usage = { prompt_tokens: 1, completion_tokens: 1, total_tokens: 2 };
  response.setHeader("content-type", "application/json");
  response.end(JSON.stringify({ id: "c", object: "chat.completion", created: 1, model: "own", choices: [choice], usage }));
});
await new Promise((ready) => server.listen(0, "127.0.0.1", ready));
const baseURL = `http://127.0.0.1:${server.address().port}/v1`;
const llm = new OpenAI({ model: "own", apiKey: "none", baseURL });

async function third(more) {
  const chat = new SimpleChatEngine({ llm, ...more });
  for (const turn of [0, 1, 2]) await chat.chat({ message: `${turn} ${"word ".repeat(300)}` });
  const users = asked.filter((message) => message.role === "user");
  return users.map((message) => `user ${message.content[0]}`).join(", ");
}

const lines = [
  `contextWindow: ${llm.metadata.contextWindow}`,
  `third request: ${await third({})}`,
  `third request, tokenLimit 30000: ${await third({ memory: createMemory({ tokenLimit: 30000 }) })}`,
];
const metadata = { ...llm.metadata, contextWindow: 32768 };
Object.defineProperty(llm, "metadata", { value: metadata });
lines.push(`third request, metadata of one's own: ${await third({})}`);
server.close();
console.log(lines.join("\n"));
const seen = [
  "contextWindow: 1024",
  "third request: user 2",
  "third request, tokenLimit 30000: user 2",
  "third request, metadata of one's own: user 0, user 1, user 2",
];
process.exit(lines.join("|") === seen.join("|") ? 0 : 1);
JS
node run.mjs
