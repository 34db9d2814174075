// OpenAI's own SDK: answers, streams, objects, a loop with a tool, Responses, counts and errors.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const Weather = z.object({ city: z.enum(["Paris", "Rome"]), is_warm: z.boolean() });
const messages = [{ role: "user", content: "Tell me of Ada." }];
const chat = { model: "demo", messages, temperature: 0 };
const response = { model: "demo", input: "Tell me of Ada.", temperature: 0, store: false };

const names = [];
for await (const model of client.models.list()) names.push(model.id);
assert.deepEqual(names, ["demo"]);

const whole = await client.chat.completions.create({ ...chat, max_completion_tokens: 20 });
const streamed = client.chat.completions.stream({ ...chat, max_completion_tokens: 20 });
assert.equal(await streamed.finalContent(), whole.choices[0].message.content);
const response_format = zodResponseFormat(Weather, "weather");
const parsed = await client.chat.completions.parse({ ...chat, response_format });
Weather.parse(parsed.choices[0].message.parsed);

const asked = [];
const runner = client.chat.completions.runTools(
  {
    ...chat,
    max_completion_tokens: 900,
    tool_choice: "required",
    parallel_tool_calls: false,
    tools: [zodFunction({ name: "weather", parameters: Weather, function: (input) => asked.push(input) })],
  },
  { maxChatCompletions: 2 },
);
await runner.done();
asked.forEach((input) => Weather.parse(input));
assert.equal(asked.length, 2);

const text = { format: zodTextFormat(Weather, "weather") };
Weather.parse((await client.responses.parse({ ...response, text })).output_parsed);
const events = client.responses.stream({ ...response, max_output_tokens: 20 });
const { usage } = await events.finalResponse();
const { model, input } = response;
const count = await client.responses.inputTokens.count({ model, input });
assert.equal(count.input_tokens, usage.input_tokens);

for (const [fields, kind] of [
  [{ model: "no-such-model" }, OpenAI.NotFoundError],
  [{ temperature: -1 }, OpenAI.BadRequestError],
]) {
  await assert.rejects(client.chat.completions.create({ ...chat, ...fields }), kind);
}
