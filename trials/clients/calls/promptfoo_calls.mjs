// promptfoo: an evaluation of two prompts over chat, completions and responses, with a schema, a tool and a similarity.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { BASE_URL, HOME, MODEL, call, command, end, expect, settle } from "./checks.mjs";

const ENVIRON = {
  OPENAI_API_KEY: "none",
  PROMPTFOO_CONFIG_DIR: HOME,
  PROMPTFOO_DISABLE_TELEMETRY: "1",
  PROMPTFOO_DISABLE_UPDATE: "1",
  PROMPTFOO_DISABLE_REMOTE_GENERATION: "1",
};
const schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "get_weather", description: "The weather.", parameters: schema } };
const withSchema = { response_format: { type: "json_schema", json_schema: { name: "weather", strict: true, schema } } };
const withTool = { tools: [tool], tool_choice: "required" };

const text = [{ type: "javascript", value: "typeof output === 'string' && output.trim().length > 0" }];
const city = [{ type: "javascript", value: "['Paris', 'Oslo', 'Rome'].includes((typeof output === 'string' ? JSON.parse(output) : output).city)" }];
const called = [{ type: "is-valid-openai-tools-call" }];

settle({});

async function evaluated(kind, assert, more = {}, limit = 512) {
  const config = { apiBaseUrl: BASE_URL, max_tokens: limit, max_output_tokens: limit, temperature: 1, ...more };
  const plan = {
    prompts: ["How is the weather in {{city}}?", "{{city}}"],
    providers: [{ id: `openai:${kind}:${MODEL}`, config }],
    tests: [{ vars: { city: "Paris" }, assert }],
  };
  settle({ "plan.json": plan });
  const out = join(HOME, "out.json");
  const args = ["eval", "--config", join(HOME, "plan.json"), "--no-cache", "--no-table", "--no-progress-bar", "--output", out];
  await command("promptfoo", args, ENVIRON).catch((error) => expect(/ended with 100/.test(error.message), error.message)); // 100: a test of the plan failed
  const { results, stats } = JSON.parse(readFileSync(out, "utf8")).results;
  const bad = results.find((each) => !each.success);
  expect(stats.successes === 2, `both prompts are answered as asserted, not ${bad?.error ?? JSON.stringify(stats)}`);
  expect(results.every((each) => each.response.tokenUsage.total > 0), "their tokens are counted");
}

await call("evaluation (chat)", () => evaluated("chat", text, {}, 16));
await call("evaluation (completion)", () => evaluated("completion", text, {}, 16));
await call("evaluation (responses)", () => evaluated("responses", text, {}, 16));
await call("structured output", () => evaluated("chat", city, withSchema));
await call("forced tool", () => evaluated("chat", called, withTool));
end();
