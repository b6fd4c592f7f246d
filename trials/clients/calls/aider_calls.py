"""aider: its command asks about a file, streamed and whole, and asks for an edit, in two formats.

The demo edits nothing; that its answer arrives, and how many tokens it counted, is what aider prints.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from checks import BASE_URL, FOLDER, MODEL, call, end, expect

LIMIT_S = 240
SETTINGS = f"- name: openai/{MODEL}\n  use_temperature: 1.0\n"  # with aider's 0 the demo repeats itself without end
STORY = "The whale is white.\n"
QUIET = [
    "--no-git",
    "--no-check-update",
    "--no-show-model-warnings",
    "--no-show-release-notes",
    "--no-suggest-shell-commands",
    "--no-detect-urls",
    "--no-pretty",
    "--analytics-disable",
    "--yes-always",
    "--map-tokens=0",
]


def asked(*flags: str, question: str = "What is in this file?") -> str:
    home = Path(FOLDER, "home")
    home.mkdir(exist_ok=True)
    story = home / "story.txt"
    story.write_text(STORY)
    settings = home / "settings.yml"
    settings.write_text(SETTINGS)
    aider = str(Path(sys.executable).with_name("aider"))
    program = [aider, "--model", f"openai/{MODEL}", "--model-settings-file", str(settings), "--message", question]
    environ = os.environ | {
        "OPENAI_API_BASE": BASE_URL,
        "OPENAI_API_KEY": "none",
        "HOME": str(home),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(
        [*program, *QUIET, "--chat-history-file=chat.md", "--input-history-file=input.txt", *flags, str(story)],
        cwd=home,
        env=environ,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=LIMIT_S,
        check=False,
    )
    expect(done.returncode == 0, f"aider ends with 0, not {done.returncode}: {done.stderr[-200:]}")
    sent = re.search(r"Tokens: ([\d.k]+) sent, ([\d.k]+) received", done.stdout)
    expect(sent, f"aider says how many tokens it has sent and received: {done.stdout[-250:]!r}")
    return done.stdout


def ask(*flags: str) -> None:
    asked("--chat-mode", "ask", *flags)


def edit(edit_format: str) -> None:
    asked("--edit-format", edit_format, question="Write that the whale is black.")


call("question, streamed", lambda: ask("--stream"))
call("question, whole", lambda: ask("--no-stream"))
for name in ("diff", "whole"):
    call(f"edit ({name})", lambda name=name: edit(name))
end()
