"""`hallmark report` as a user runs it, on the matrix that ships, opened in a real browser."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

# Written into the title by the page itself, once it is laid out.
_PROBE = "<script>document.title = document.documentElement.scrollWidth + ' of ' + window.innerWidth</script></body>"


@pytest.fixture(scope="module")
def browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("chromium is not installed (Debian package chromium)")


def report(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "hallmark", "report", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_report_of_the_shipped_matrix_fits_a_phone(browser: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    refused = report("--out", page)  # two GPUs ship
    assert refused.returncode == 3
    folders = [Path(name.strip()) for name in refused.stderr.partition("name one of ")[2].split(",")]
    assert "nvidia-h200" in [folder.name for folder in folders]
    made = report(next(folder for folder in folders if folder.name == "nvidia-h200"), "--out", page)
    assert made.returncode == 0, made.stderr
    page.write_text(page.read_text().replace("</body>", _PROBE))
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    widths = re.search(r"<title>(\d+) of (\d+)</title>", done.stdout)
    assert widths is not None, done.stderr[-2000:]
    assert int(widths[1]) <= int(widths[2])
