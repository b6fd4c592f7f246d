"""One rank of several that compute small models together: `rank_program.py FOLDER RANK WORLD`.

FOLDER holds a model folder for each variant, and is where the ranks meet. Rank 0 saves the logits of each variant.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from paged_runner import PagedRunner

from qualification.model.shard import shard_of
from server.model.decoder import Decoder
from server.model.load.load import load_config, load_shard
from server.model.ranks import Ranks

CHUNKS = [13, 1, 3, 32, 1]


def main() -> None:
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a machine's name may lead nowhere
    store = dist.FileStore(str(folder / f"meeting-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found = {}
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        config = load_config(model)
        shard = shard_of(config, rank, world)
        weights = load_shard(model, config, shard, dtype=torch.float32, device=torch.device("cpu"))
        runner = PagedRunner(Decoder(shard.local_config, weights, Ranks(rank, world)))
        token_ids = torch.randint(97, (sum(CHUNKS),), generator=torch.Generator().manual_seed(3))
        found[model.name] = runner.logits(token_ids, CHUNKS)
        same = [torch.empty_like(found[model.name]) for _ in range(world)]
        dist.all_gather(same, found[model.name])
        assert all(torch.equal(other, same[0]) for other in same), f"{model.name}: ranks differ"
    if rank == 0:
        torch.save(found, folder / f"logits-{world}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
