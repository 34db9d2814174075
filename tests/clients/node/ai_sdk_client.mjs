// The AI SDK: answers, streams, objects and tools by its provider for servers of OpenAI's API, and
// a tool over Responses by its provider for OpenAI.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "tandem",
  baseURL: `${process.argv[2]}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const prompt = "Tell me a story about Ada.";
const common = { model: provider.chatModel("demo"), prompt, temperature: 0, maxRetries: 0 };
const short = { ...common, maxOutputTokens: 20 };
const long = { ...common, maxOutputTokens: 900 };
const city = z.enum(["Paris", "Rome"]);

const whole = await generateText(short);
const stream = streamText(short);
let text = "";
for await (const part of stream.textStream) text += part;
assert.ok(text);
assert.equal(text, whole.text);
assert.equal((await stream.usage).totalTokens, whole.usage.totalTokens);
const completed = await generateText({ ...short, model: provider.completionModel("demo") });
assert.ok(completed.text);

const schema = z.object({ city, isWarm: z.boolean() });
const typed = await generateText({ ...long, output: Output.object({ schema }) });
assert.ok(schema.safeParse(typed.output).success);

const called = [];
const weather = tool({
  description: "Tells the weather of a city.",
  inputSchema: z.object({ city }),
  strict: true,
  execute: async (input) => {
    called.push(input.city);
    return `It is warm in ${input.city}.`;
  },
});
const agent = await generateText({
  ...long,
  tools: { weather },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
});
assert.equal(agent.steps.length, 2);
assert.ok(called.length && agent.text);
const named = streamText({
  ...long,
  tools: { weather },
  toolChoice: { type: "tool", toolName: "weather" },
});
const [call] = await named.toolCalls;
assert.ok(city.safeParse(call.input.city).success);

const unknown = { ...short, model: provider.chatModel("no-such-model") };
await assert.rejects(generateText(unknown), (error) => error.statusCode === 404);

// It refers to its own answers by their names, unless it is said that nothing is stored.
const openai = createOpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none" });
const responses = await generateText({
  model: openai("demo"),
  prompt,
  maxRetries: 0,
  maxOutputTokens: 900,
  providerOptions: { openai: { store: false } },
  tools: { weather },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
});
assert.equal(responses.steps.length, 2);
assert.ok(responses.text);
