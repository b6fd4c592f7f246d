"use strict";
/* What a task is asked: a path below /v1, a body, and Python's lines behind the client's. */
const CALLS = {
  generate: ["chat/completions", name => ({model: name, messages: [{role: "user", content: "Tell me a story."}], max_tokens: 64, stream: true, hallmark: true}), name => [
    "answer = client.chat.completions.create(", "    model=" + name + ",", "    messages=[{\"role\": \"user\", \"content\": \"Tell me a story.\"}],",
    "    max_tokens=64,", "    extra_body={\"hallmark\": True},", ")", "print(answer.choices[0].message.content)", "print(answer.hallmark)"]],
  embed: ["embeddings", name => ({model: name, input: ["The capital of China is Beijing.", "Apples are red."]}), name => [
    "answer = client.embeddings.create(", "    model=" + name + ",", "    input=[\"The capital of China is Beijing.\", \"Apples are red.\"],", ")", "print(len(answer.data[0].embedding))"]],
  score: ["rerank", name => ({model: name, query: "What is the capital of China?", documents: ["Beijing.", "Apples are red."]}), name => [
    "answer = client.post(", "    \"/rerank\",", "    body={\"model\": " + name + ", \"query\": \"What is the capital of China?\", \"documents\": [\"Beijing.\", \"Apples are red.\"]},",
    "    cast_to=object,", ")", "print(answer[\"results\"])"]],
};
function showSnippets() {
  const url = new URL("v1", base).href, name = model || "MODEL";
  const [path, bodyOf, linesOf] = CALLS[task], body = JSON.stringify(bodyOf(name));
  const hasKey = isKeyNeeded || userKey() !== "", key = hasKey ? " \\\n  -H \"Authorization: Bearer $HALLMARK_API_KEY\"" : "";
  const curl = "curl " + (task === "generate" ? "-N " : "") + shell(url + "/" + path) + " -H 'Content-Type: application/json'" + key + " \\\n  -d " + shell(body);
  const python = ["import openai", "", "client = openai.OpenAI(base_url=" + JSON.stringify(url) + ", api_key=" + (hasKey ? "\"YOUR_KEY\"" : "\"none\"") + ")",
    ...linesOf(JSON.stringify(name))].join("\n");
  if ($("curl").textContent !== curl) $("curl").textContent = curl;
  if ($("python").textContent !== python) $("python").textContent = python;
}
