"""guidellm: a load on chat and on completions, streamed, prompts made with the demo's own tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

from checks import FOLDER, MODEL, TOKENIZER, URL, call, end, expect

NUM_REQUESTS = 6


def run(request_format: str) -> None:
    results = Path(FOLDER, f"results{request_format.replace('/', '-')}.json")
    results.unlink(missing_ok=True)
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={request_format}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--output", f"kind=json,path={results}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, check=False)
    expect(done.returncode == 0, f"it ends well, not with {done.returncode}: {(done.stderr or done.stdout)[-200:]}")
    (found,) = json.loads(results.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    expect(totals["successful"] == NUM_REQUESTS, f"every request succeeds: {totals}")


call("streamed chat", lambda: run("/v1/chat/completions"))
call("streamed completions", lambda: run("/v1/completions"))
end()
