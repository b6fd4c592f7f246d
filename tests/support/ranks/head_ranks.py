"""A small engine of several ranks that drafts by its model's own head: `head_ranks WORLD OUT MODEL`, a fork."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from support.engine.reproducible_engine import answers, build, requests


def main() -> None:
    world, out, model = sys.argv[1:]
    options = {"tensor_parallel_size": int(world), "layer_check": False}
    built = build(Path(model), Path(out).parent / "cache", speculative_tokens=3, **options)
    engine, step = built.engine, built.engine.step
    few: dict[str, object] = {
        "max_tokens": 16,
        "temperature": 1.0,
        "logprobs": 1,
        "seed": 3,
        "allowed_token_ids": (5, 6),
    }  # mostly hold
    asked = [
        replace(it, sampling=msgspec.structs.replace(it.sampling, **(few if index else {"max_tokens": 16})))
        for index, it in enumerate(requests(97, (50, 58, 30)))
    ]
    accepted = 0

    def counted() -> object:
        nonlocal accepted
        output = step()
        if output is not None and output.record.drafts is not None:
            accepted += sum(output.record.drafts.accepted)
        return output

    engine.step = counted  # type: ignore[method-assign, assignment]
    found: dict[str, object] = {}
    for kind in ("drafted", "plain"):
        found[kind] = {
            name: [it.tokens, it.scores.hex()] for name, it in answers(engine, asked, at_once=3, seed=1).items()
        }
        engine.drafter = None
    assert built.followers is not None
    built.followers.close()
    Path(out).write_text(json.dumps({**found, "accepted": accepted}))


if __name__ == "__main__":
    main()
