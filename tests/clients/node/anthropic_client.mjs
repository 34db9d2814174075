// Anthropic's own SDK: a loop of tools, which first asks for a thread on the server, and streams.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me of Ada." }];
const common = { model: "demo", messages, temperature: 0 };
const city = z.enum(["Paris", "Rome"]);

const whole = await client.messages.create({ ...common, max_tokens: 20 });
assert.ok(whole.content[0].text && whole.usage.output_tokens);
const streamed = client.messages.stream({ ...common, max_tokens: 20 });
assert.equal((await streamed.finalMessage()).usage.output_tokens, whole.usage.output_tokens);

const called = [];
const weather = betaZodTool({
  name: "weather",
  description: "Tells the weather of a city.",
  inputSchema: z.object({ city }),
  run: async (input) => {
    called.push(city.parse(input.city));
    return "It is warm.";
  },
});
const runner = client.beta.messages.toolRunner({
  ...common,
  max_tokens: 900,
  tools: [weather],
  tool_choice: { type: "any", disable_parallel_tool_use: true },
  max_iterations: 2,
});
const prompts = [];
for await (const message of runner) {
  const { usage } = message;
  prompts.push(usage.input_tokens + (usage.cache_read_input_tokens ?? 0));
}
assert.equal(called.length, 2);
// The second request has the conversation, and not its last turn alone.
assert.ok(prompts[1] > prompts[0], prompts.join(", "));
