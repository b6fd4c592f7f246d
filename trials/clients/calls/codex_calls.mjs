// Codex's command line: a run and a second turn of its session, over responses, with its own instructions and tools.
import { BASE_URL, MODEL, call, command, end, expect, lines, settle } from "./checks.mjs";

settle({
  ".codex/config.toml": `model = "${MODEL}"
model_provider = "hallmark"
model_context_window = 60000
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.hallmark]
name = "Hallmark"
base_url = "${BASE_URL}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`,
});

async function run(...args) {
  const events = lines(await command("codex", ["exec", ...args]));
  const texts = events.filter((event) => event.item?.type === "agent_message").map((event) => event.item.text);
  expect(texts.join("").trim(), `there is text, among the events ${events.map((event) => event.type)}`);
  const usage = events.findLast((event) => event.type === "turn.completed")?.usage;
  expect(usage?.output_tokens > 0, "the turn is completed and its tokens are counted");
}

const flags = ["--json", "--skip-git-repo-check"];
await call("run", () => run(...flags, "--sandbox", "read-only", "How is the weather?"));
await call("second turn", () => run("resume", "--last", ...flags, "And tomorrow?"));
end();
