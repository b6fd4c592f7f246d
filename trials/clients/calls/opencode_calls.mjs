// opencode: a run with the tools of a reader of code, over chat and over responses, and a second turn of its session.
import { BASE_URL, HOME, MODEL, call, command, end, expect, lines, settle } from "./checks.mjs";

const options = { baseURL: BASE_URL, apiKey: "none" };
const models = { [MODEL]: { name: MODEL, limit: { context: 65536, output: 48 } } };
const provider = {
  chat: { npm: "@ai-sdk/openai-compatible", name: "chat", options, models },
  responses: { npm: "@ai-sdk/openai", name: "responses", options, models },
};
// Two of its tools: all of them are 12,000 tokens of prompt, a minute of two cores.
const tools = Object.fromEntries(["bash", "edit", "write", "patch", "task", "todowrite", "todoread", "webfetch", "websearch", "glob", "list", "skill", "question", "lsp"].map((name) => [name, false]));
const quiet = { OPENCODE_DISABLE_MODELS_FETCH: "1", OPENCODE_DISABLE_AUTOUPDATE: "1", OPENCODE_DISABLE_LSP_DOWNLOAD: "1" };

settle({
  "project/opencode.json": { autoupdate: false, share: "disabled", provider, tools, enabled_providers: Object.keys(provider) },
  "project/story.txt": "The whale is white.\n",
});

async function run(kind, ...flags) {
  const out = await command("opencode", ["run", "--pure", "--format", "json", "--title", "trial", "--model", `${kind}/${MODEL}`, ...flags, "What is in story.txt?"], quiet);
  const events = lines(out);
  const texts = events.filter((event) => event.type === "text").map((event) => event.part.text);
  expect(texts.join("").trim(), `there is text, among the events ${events.map((event) => event.type)}`);
  const last = events.findLast((event) => event.type === "step_finish").part;
  expect(["stop", "length"].includes(last.reason), `a step ends by stop or length, not ${last.reason}`);
  expect(last.tokens.output > 0, "its tokens are counted");
}

await call("run (chat)", () => run("chat"));
await call("second turn (chat)", () => run("chat", "--continue"));
await call("run (responses)", () => run("responses"));
end();
