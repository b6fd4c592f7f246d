"""`hallmark completion`: what a shell offers behind a word."""

import subprocess
from pathlib import Path

import pytest

from server.cli.completion import script_for
from server.cli.main import build_parser, main

OFFERED = """
source "$1"
COMP_WORDS=(hallmark $2 "$3")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
COMP_LINE="${COMP_WORDS[*]}"
$(complete -p hallmark | sed -E 's/.*-F ([^ ]+).*/\\1/') hallmark "$3" "${COMP_WORDS[COMP_CWORD - 1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "hallmark.bash"
    file.write_text(script_for("bash", build_parser()))
    return file


@pytest.mark.parametrize(
    ("before", "word", "wanted"),
    [
        ("", "se", {"serve"}),
        ("serve", "--on-un", {"--on-unproven"}),
        ("serve --on-unproven", "", {"refuse", "qualify", "degrade"}),
        ("serve --device", "cu", {"cuda"}),
        ("serve --ssl-certfile", "here/a.", {"here/a.pem"}),
        ("serve --matrix", "he", {"here"}),
        ("matrix", "d", {"diff"}),
        ("completion", "", {"bash", "zsh", "fish"}),
    ],
)
def test_bash_completes(before: str, word: str, wanted: set[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "a.pem").touch()
    command = ["bash", "--norc", "-c", OFFERED, "bash", str(script), before, word]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    assert set(done.stdout.split()) == wanted


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_of_another_shell_has_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    for word in ("canary", "on-unproven", "max-num-seqs", "degrade"):
        assert word in text


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fihs"]) == 2
    assert "did you mean fish?" in capsys.readouterr().err
