"""The program `hallmark`, also as `python -m hallmark`."""

import sys
import threading

_SILENT_AT_MOST_S = 8


def main() -> int:
    """The program's entry; returns its exit code."""
    # From a cold disk imports take up to half a minute, in which nothing else of ours runs.
    imported = threading.Event()
    if sys.argv[1:2] == ["serve"]:
        threading.Thread(target=_say_so, args=(imported,), daemon=True).start()
    from server.cli.main import main as run_command

    imported.set()
    return run_command()


def _say_so(imported: threading.Event) -> None:
    waited_s = 0
    while not imported.wait(_SILENT_AT_MOST_S):
        waited_s += _SILENT_AT_MOST_S
        print(f"starting: Python loads the server's modules, for {waited_s} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
