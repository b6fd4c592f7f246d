"""Runs calls of race_calls.py several times by the kernels on the path; prints what each run gave, one line a run.

Exits with HUNG where a launch takes longer than seconds. `--compile` launches no attention.
"""

import argparse
import hashlib
import os
import time

import torch

from kernels.hopper.decode import launch as gluon_decode_launch
from kernels.hopper.extend import launch as gluon_extend_launch
from kernels.hopper.prefill import launch as gluon_prefill_launch
from support.races import race_calls

HUNG = 3
SECONDS = 4.0  # a shaken call takes a few milliseconds
# Some sequences of many key blocks, so that every stage is used again, and many of one, so that tiles follow fast.
LENGTHS = [2000, 1300, 700, *(1 + 37 * i % 128 for i in range(40))]
HEADS = (32, 8)


class Compiled(Exception):
    """Instead of a launch."""


def stop(*_: object) -> None:
    raise Compiled


def finish(name: str) -> None:
    """Wait for the device, but not for ever."""
    event = torch.cuda.Event()
    event.record()
    deadline = time.monotonic() + SECONDS
    while not event.query():
        if time.monotonic() > deadline:
            print("hung", name, flush=True)
            os._exit(HUNG)
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    race_calls.HEADS, race_calls.LENGTHS = HEADS, LENGTHS
    if options.compile:
        gluon_prefill_launch.Loaded = gluon_extend_launch.Loaded = gluon_decode_launch.Loaded = stop
    for name in options.names:
        for _ in range(options.repeats):
            torch.manual_seed(0)
            try:
                out = race_calls.CALLS[name]()
            except Compiled:
                break
            print("launched", name, flush=True)
            finish(name)
            digest = hashlib.sha256(out.cpu().view(torch.int16).numpy().tobytes()).hexdigest()[:16]
            print("gave", digest, name, flush=True)


if __name__ == "__main__":
    main()
