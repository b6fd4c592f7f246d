// OpenAI's npm client: chat, streaming, tools with its runner, structured output with zod, log probabilities, responses.
// Node finds packages beside a script, so they are imported from the client's own folder.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

import { BASE_URL, FOLDER, MODEL, call, end, expect } from "./checks.mjs";

const require = createRequire(`${FOLDER}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { default: OpenAI } = await load("openai");
const { zodResponseFormat } = await load("openai/helpers/zod");
const { z } = await load("zod");

const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const model = MODEL;
const messages = [{ role: "user", content: "Tell me about the forest." }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", description: "The weather.", parameters } }];

await call("chat", async () => {
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 16 });
  expect(answer.choices[0].message.content, "an answer has text");
  expect(["stop", "length"].includes(answer.choices[0].finish_reason), "it has stopped or is long enough");
});

await call("streaming", async () => {
  const stream = await client.chat.completions.create({
    model, messages, max_tokens: 16, stream: true, stream_options: { include_usage: true },
  });
  let text = "", usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  expect(text && usage.completion_tokens > 0, "there is text and its tokens are counted");
});

await call("tools", async () => {
  const answer = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 512 });
  const [first] = answer.choices[0].message.tool_calls;
  expect(answer.choices[0].finish_reason === "tool_calls", "finish reason");
  expect(parameters.properties.city.enum.includes(JSON.parse(first.function.arguments).city), "the argument is one of the enum");
});

await call("streamed tools", async () => {
  const stream = client.chat.completions.stream({
    model, messages, tools, tool_choice: { type: "function", function: { name: "get_weather" } }, max_tokens: 512,
  });
  const final = await stream.finalChatCompletion();
  expect(final.choices[0].message.tool_calls[0].function.name === "get_weather", "the tool is called by its name");
});

await call("parse", async () => {
  const schema = z.object({ city: z.enum(["Paris", "Oslo"]), is_warm: z.boolean() });
  const answer = await client.chat.completions.parse({
    model, messages, response_format: zodResponseFormat(schema, "weather"), max_tokens: 512,
  });
  expect(typeof answer.choices[0].message.parsed.is_warm === "boolean", "the answer is an object of the schema");
});

await call("logprobs", async () => {
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 4, logprobs: true, top_logprobs: 2 });
  expect(answer.choices[0].logprobs.content.every((each) => each.top_logprobs.length === 2), "two tokens at each place");
});

await call("responses", async () => {
  const answer = await client.responses.create({ model, input: "Tell me about the sea.", max_output_tokens: 16 });
  expect(answer.output_text, "a response has text");
});

await call("streamed responses", async () => {
  const kinds = [];
  const stream = await client.responses.create({ model, input: "The sea?", max_output_tokens: 16, stream: true });
  for await (const event of stream) kinds.push(event.type);
  expect(kinds[0] === "response.created" && kinds.includes("response.output_text.delta"), `events: ${[...new Set(kinds)]}`);
});

await call("embeddings", async () => {
  const embedder = client.withOptions({ baseURL: `${process.env.HALLMARK_EMBED_URL}/v1` });
  const answer = await embedder.embeddings.create({ model, input: "a forest" }); // as base64, which this client decodes
  expect(answer.data[0].embedding.length === 256, "a vector of 256");
});

end();
