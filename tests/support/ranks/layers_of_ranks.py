"""An engine of two ranks on a CPU whose layers are checked: `python -m support.ranks.layers_of_ranks MODULE OUT`.

MODULE is what the other rank runs. Writes what the check has found.
"""

import json
import sys
from pathlib import Path

import torch

from qualification.model.forward.model import ForwardReference
from server.engine.proof.layer_check import LayerCheck
from server.engine.proof.layer_steps import LayerSteps
from server.engine.startup.subject import read_subject
from support.ranks.ranks_engine import MAX_LEN, NUM_PAGES, PAGE_SIZE, Ranks, settings_of


def main() -> None:
    module, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    ranks = Ranks(2, module)
    subject = read_subject(settings_of(2))
    torch.set_num_threads(1)
    reference = ForwardReference(subject.folder, subject.model, torch.float32, subject.device, context=MAX_LEN, ranks=2)
    steps = LayerSteps(
        vocab_size=subject.model.vocab_size, page_size=PAGE_SIZE, num_pages=NUM_PAGES, max_len=MAX_LEN, max_tokens=64,
        max_rows=8,
    ).all()  # fmt: skip
    found = LayerCheck(ranks.runner, reference, ranks.worker.logits, kv_dtype=torch.float32).run(steps)
    out.write_text(json.dumps({"first": found.first and str(found.first), "largest": found.largest.factor}))
    assert ranks.followers is not None
    ranks.followers.close()


if __name__ == "__main__":
    main()
