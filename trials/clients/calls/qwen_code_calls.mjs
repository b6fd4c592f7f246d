// Qwen Code: a run over chat, over responses and over messages, an object of a schema, and a second turn of a session.
import { BASE_URL, MODEL, call, command, end, expect, settle } from "./checks.mjs";

// Without its memory and the tools for agents: with them a run has prompts of 21,000 and 16,000 tokens.
const FLAGS = ["--core-tools", "read_file", "--exclude-tools", "agent,list_agents,get_goal,update_goal,tool_search,tool_call,report_findings,record_artifact,send_message,enter_worktree,exit_worktree,task_stop", "--output-format", "json"];
const URLS = { openai: BASE_URL, "openai-responses": BASE_URL, anthropic: process.env.HALLMARK_URL };

settle({
  ".qwen/settings.json": {
    general: { disableAutoUpdate: true },
    memory: { enableManagedAutoMemory: false, enableManagedAutoDream: false, enableAutoSkill: false },
    ui: { enableFollowupSuggestions: false },
    privacy: { usageStatisticsEnabled: false },
    telemetry: { enabled: false },
    model: { name: MODEL, generationConfig: { samplingParams: { max_tokens: 48 }, contextWindowSize: 60000, maxRetries: 0 } },
  },
});

async function run(kind, ...flags) {
  const prefix = kind === "anthropic" ? "ANTHROPIC" : "OPENAI";
  const environ = { [`${prefix}_API_KEY`]: "none", [`${prefix}_BASE_URL`]: URLS[kind], [`${prefix}_MODEL`]: MODEL };
  const out = await command("qwen", ["--auth-type", kind, "--model", MODEL, ...FLAGS, ...flags, "How is the weather?"], environ);
  const result = JSON.parse(out).findLast((event) => event.type === "result");
  expect(result && !result.is_error, `a result without an error, not ${out.slice(-200)}`);
  expect(result.usage.output_tokens > 0, "its tokens are counted");
  return result;
}

await call("run (chat)", async () => expect((await run("openai")).result.trim(), "there is text"));
await call("second turn (chat)", async () => expect((await run("openai", "--continue")).result.trim(), "there is text"));
await call("run (responses)", async () => expect((await run("openai-responses")).result.trim(), "there is text"));
await call("run (messages)", async () => expect((await run("anthropic")).result.trim(), "there is text"));
end();
