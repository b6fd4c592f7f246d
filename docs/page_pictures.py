"""Take the pictures of the page: ready, under load, and after a quarantine. Needs chromium and a running demo.

    make serve                                                        # elsewhere; without API keys
    .venv/bin/python docs/page_pictures.py http://127.0.0.1:8000/

It puts a kernel path into quarantine and lifts that again: not for a server that others use.
"""

import base64
import json
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent / "tests"))

from support.e2e.browser import Tab, browsing, find_browser  # noqa: E402

IMAGES = DOCS / "images"
WIDTH, HEIGHT = 1240, 980
IS_ANSWERED = "!running && conversation.length > 0 && conversation.at(-1).role === 'assistant'"
LOAD = """
Promise.all(Array.from({length: 4}, (_, i) => call("v1/completions", null, {method: "POST",
  headers: {"Content-Type": "application/json"}, body: JSON.stringify({prompt: "It was late. ".repeat(8 + 90 * i),
  max_tokens: 120, ignore_eos: true})}))).then(() => { window.isLoadOver = true; }); 0
"""


def ask(tab: Tab, text: str, num_tokens: int = 40) -> None:
    """Send a message and wait for the whole answer."""
    tab.value(f"$('max-tokens').value = {num_tokens}; $('prompt').value = {json.dumps(text)}; send(); 0")
    tab.wait_for(IS_ANSWERED, timeout_s=120)


def wait(tab: Tab, seconds: float) -> None:
    tab.value(f"new Promise(done => setTimeout(done, {1000 * seconds}))")


def take(tab: Tab, name: str) -> None:
    """Write what the window shows to docs/images."""
    tab.value("$('prompt').blur(); scrollTo(0, 0)")
    answer = tab.call("Page.captureScreenshot", format="png")
    (IMAGES / f"page-{name}.png").write_bytes(base64.b64decode(answer["data"]))


def open_page(tab: Tab, url: str, *, is_dark: bool = False) -> None:
    tab.open(url, width=WIDTH, height=HEIGHT, is_dark=is_dark)
    tab.wait_for("$('state').textContent === 'ready' && !$('figures-body').hidden", timeout_s=300)


def main(url: str) -> None:
    program = find_browser()
    if program is None:
        raise SystemExit("chromium is not installed (Debian package chromium)")
    with tempfile.TemporaryDirectory() as profile, browsing(program, Path(profile)) as tab:
        open_page(tab, url)
        ask(tab, "Tell me a story about a dog.")
        ask(tab, "And then?")
        wait(tab, 9)
        take(tab, "ready")
        open_page(tab, url, is_dark=True)
        tab.value(LOAD)
        wait(tab, 14)
        take(tab, "load")
        tab.wait_for("window.isLoadOver", timeout_s=300)
        quarantine = (
            '{headers: {"Content-Type": "application/json"}, body: JSON.stringify({path: "sdpa.cpu"}), method: '
        )
        tab.value(f'call("attention/quarantine", null, {quarantine} "POST"}}).then(it => it.status)')
        try:
            open_page(tab, url)
            tab.value("$('clear').click()")
            ask(tab, "Tell me a story about a lighthouse.", 24)
            wait(tab, 17)
            take(tab, "fallback")
        finally:
            tab.value(f'call("attention/quarantine", null, {quarantine} "DELETE"}}).then(it => it.status)')


if __name__ == "__main__":
    main(sys.argv[1])
