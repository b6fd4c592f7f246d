// Claude Code: a run with two of its tools, a streamed one, and a second turn of a session.
import { MODEL, call, command, end, expect, lines, settle } from "./checks.mjs";

const ENVIRON = {
  ANTHROPIC_BASE_URL: process.env.HALLMARK_URL,
  ANTHROPIC_AUTH_TOKEN: "none",
  ANTHROPIC_MODEL: MODEL,
  ANTHROPIC_SMALL_FAST_MODEL: MODEL,
  ANTHROPIC_DEFAULT_HAIKU_MODEL: MODEL,
  CLAUDE_CODE_MAX_OUTPUT_TOKENS: "2000", // an answer that it cuts is an error to it
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  DISABLE_AUTOUPDATER: "1",
};
// Without the others: all of its tools are 64 KB of the prompt, minutes of two cores.
const FLAGS = ["--print", "--tools", "Read,Grep", "--model", MODEL];

settle({ "project/story.txt": "The whale is white.\n" });

function check(result) {
  expect(result?.subtype === "success" && !result.is_error, `a result without an error, not ${JSON.stringify(result)}`);
  expect(result.result.trim() && result.usage.output_tokens > 0, "there is text, and its tokens are counted");
}

async function run(...flags) {
  check(JSON.parse(await command("claude", [...FLAGS, "--output-format", "json", ...flags, "What is in story.txt?"], ENVIRON)));
}

await call("run", () => run());
await call("second turn", () => run("--continue"));
await call("streamed run", async () => {
  const events = lines(
    await command("claude", [...FLAGS, "--output-format", "stream-json", "--include-partial-messages", "--verbose", "How is the weather?"], ENVIRON),
  );
  expect(events.some((event) => event.event?.delta?.type === "text_delta"), "text is streamed");
  check(events.findLast((event) => event.type === "result"));
});
end();
