"""lm-eval's local-completions: one task by log probabilities of a prompt, one by generated text, data of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import BASE_URL, FOLDER, MODEL, TOKENIZER, call, end, expect

ROWS = [
    {"question": "Once upon a time there was a", "choices": ["king", "number"], "answer": 0},
    {"question": "The whale swam in the", "choices": ["sea", "table"], "answer": 0},
]
COMMON = """
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = (
    "task: local_choice\noutput_type: multiple_choice\n"
    'doc_to_target: answer\ndoc_to_choice: "{{{{choices}}}}"\nmetric_list:\n  - metric: acc\n'
)
GENERATE = (
    "task: local_text\noutput_type: generate_until\n"
    'doc_to_target: "{{{{choices[answer]}}}}"\ngeneration_kwargs:\n  until: ["."]\n  max_gen_toks: 8\n'
    "metric_list:\n  - metric: exact_match\n"
)


def evaluate(task: str, text: str, metric: str) -> None:
    folder = Path(FOLDER, "tasks", task)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (folder / f"{task}.yaml").write_text((text + COMMON).format(data=data))
    arguments = f"model={MODEL},base_url={BASE_URL}/completions,tokenizer={TOKENIZER},num_concurrent=2,max_retries=1"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", arguments]
    command += [
        "--include_path",
        str(folder),
        "--tasks",
        task,
        "--output_path",
        str(folder / "out"),
        "--batch_size",
        "2",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=os.environ, check=False)
    expect(done.returncode == 0, f"it ends well: {done.stderr.strip().splitlines()[-1:]}")
    newest = max((folder / "out").rglob("results_*.json"), key=lambda path: path.stat().st_mtime)
    found = json.loads(newest.read_text())["results"][task]
    expect(f"{metric},none" in found, f"there is {metric}, among {sorted(found)}")


call("log probabilities (multiple choice)", lambda: evaluate("local_choice", CHOICE, "acc"))
call("generated text", lambda: evaluate("local_text", GENERATE, "exact_match"))
end()
