"""The process that times a whole model: `python -m server.bench.full_model.worker ASKED.json FOUND.json`.

Another one than the qualification's: after a profiler each replay of a decode graph takes 83 us longer for good
(`qualification/attest/driver_record.py`), and what a run has allocated leaves less to an engine.
"""

import sys
from pathlib import Path

import msgspec

from kernels.whole_file import write_whole
from qualification.evidence.full_model import FullModel
from qualification.exit_code import ExitCode
from server.bench.full_model.measure import measure_model
from server.engine.startup.attention_plan import Unservable
from server.errors import StartError
from server.settings import Settings


class Asked(msgspec.Struct, frozen=True):
    settings: Settings  # `model` is a folder with config.json
    name: str
    command: str
    commit: str | None


def main(asked_file: Path, found_file: Path) -> int:
    """Writes the file after each attention, so that what is measured is kept whatever comes."""
    asked = msgspec.json.decode(asked_file.read_bytes(), type=Asked)

    def keep(found: FullModel) -> None:
        write_whole(found_file, msgspec.json.encode(found))

    try:
        measure_model(
            asked.settings,
            name=asked.name,
            command=asked.command,
            commit=asked.commit,
            say=lambda line: print(line, flush=True),
            keep=keep,
        )
    except (StartError, Unservable) as error:
        print(f"hallmark: {asked.name}: {error}", file=sys.stderr, flush=True)
        return ExitCode.ENVIRONMENT
    except KeyboardInterrupt:  # who asked says so
        return ExitCode.INCONCLUSIVE
    return ExitCode.PASS


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
