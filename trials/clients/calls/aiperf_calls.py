"""aiperf: a load on chat and on completions, streamed, prompts made with the demo's own tokenizer."""

import json
import os
import subprocess
import sys
from pathlib import Path

from checks import FOLDER, MODEL, TOKENIZER, URL, call, end, expect

NUM_REQUESTS = 6


def profile(kind: str, *flags: str) -> None:
    folder = Path(FOLDER, f"results-{kind}")
    command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--model", MODEL, "--url", URL]
    command += ["--endpoint-type", kind, "--tokenizer", TOKENIZER, "--request-count", str(NUM_REQUESTS), *flags]
    command += ["--concurrency", "2", "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"]
    command += ["--artifact-dir", str(folder), "--ui", "none"]
    # Told that it is offline it takes no folder for a tokenizer: so the hub is an address that nothing listens on.
    environ = {name: text for name, text in os.environ.items() if not name.endswith("_OFFLINE")}
    environ |= {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER, env=environ, check=False)
    expect(done.returncode == 0, f"it ends well, not with {done.returncode}: {done.stdout.strip()[-200:]}")
    found = json.loads((folder / "profile_export_aiperf.json").read_text())
    expect(found["request_count"]["avg"] == NUM_REQUESTS, f"every request is counted: {found['request_count']}")
    expect(not found.get("error_summary"), f"there is no error: {found.get('error_summary')}")
    if "--streaming" in flags:
        expect(found["time_to_first_token"]["avg"] > 0, "there is a time to the first token")


call("streamed chat", lambda: profile("chat", "--streaming"))
call("streamed completions", lambda: profile("completions", "--streaming"))
end()
