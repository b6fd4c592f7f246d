"""Ranks that compute small models together: `rank_program FOLDER MODEL...`, a fork whose forks they are.

FOLDER holds a folder for each model, and is where the ranks meet. Four ranks compute all models, and two those that are
named. Rank 0 saves the logits of each. The routers of mixtures must see the same bits on all ranks, also where the last
rank alone rounds its products otherwise.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.linear.epilogue import Epilogue
from kernels.linear.rounded_input import Input
from qualification.model.shard import shard_of
from server.model.decoder import Decoder, Operators
from server.model.linear import Linear, Product, WeightName, unplanned
from server.model.load.load import load_config, load_shard
from server.model.ranks import Ranks
from server.model.step import Step
from support.models.paged_runner import PagedRunner

WORLDS = (2, 4)
CHUNKS = [13, 1, 3]


def main() -> None:
    torch.set_num_threads(1)
    folder, named = Path(sys.argv[1]), [Path(sys.argv[1], name) for name in sys.argv[2:]]
    whole = sorted(path for path in folder.iterdir() if path.is_dir())
    for world, models in zip(WORLDS, (named, whole), strict=True):
        ranks = [os.fork() or compute(folder, models, rank, world) for rank in range(world)]
        ended = [os.waitpid(rank, 0)[1] for rank in ranks]
        assert ended == [0] * world, f"ranks of {world} ended with {ended}"


def compute(folder: Path, models: list[Path], rank: int, world: int) -> NoReturn:
    """Be one rank, and end."""
    store = dist.FileStore(str(folder / f"meeting-{world}"), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    exchange(Ranks(rank, world))
    found = {}
    token_ids = torch.randint(97, (sum(CHUNKS),), generator=torch.Generator().manual_seed(3))
    for model in models:
        config = load_config(model)
        shard = shard_of(config, rank, world)
        weights = load_shard(model, config, shard, dtype=torch.float32, device=torch.device("cpu"))
        decoder = Decoder(shard.local_config, weights, Ranks(rank, world))
        found[model.name], right = logits(decoder, token_ids)
        assert are_equal(found[model.name], world), f"{model.name}: ranks differ"
        if right is not None:
            _, other = logits(decoder, token_ids, is_other=rank == world - 1)
            assert other is not None
            assert not torch.equal(right, other), f"{model.name}: no router has seen another rounding"
            assert are_equal(other, world), f"{model.name}: routers differ"
    if rank == 0:
        torch.save(found, folder / f"logits-{world}.pt")
    dist.destroy_process_group()
    os._exit(0)


def are_equal(own: Tensor, world: int) -> bool:
    """Return whether all ranks have the same bits."""
    each = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(each, own)
    return all(torch.equal(it, each[0]) for it in each)


def logits(decoder: Decoder, token_ids: Tensor, *, is_other: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the model's logits and those of all routers; `is_other`: each other product is rounded up by a bit.

    So does a rank that alone leaves a product to PyTorch's algorithms.
    """
    found: list[Tensor] = []

    def product_of(layer: int | None, name: WeightName, linear: Linear, epilogue: Epilogue) -> Product:
        right = unplanned(layer, name, linear, epilogue)

        def product(x: Input, step: Step | None, out: Tensor | None = None) -> Tensor:
            y = right(x, step, out)
            if name is WeightName.ROUTER:
                found.append(y.clone())
                return y
            return torch.nextafter(y, torch.tensor(torch.inf)) if is_other else y

        return product

    decoder = Decoder(decoder.config, decoder.weights, decoder.ranks, Operators(product_of))
    return PagedRunner(decoder).logits(token_ids, CHUNKS), torch.cat(found) if found else None


def exchange(ranks: Ranks) -> None:
    """Assert what each exchange gives, of numbers that say which rank they come from."""
    index, world = ranks.index, ranks.world
    own = torch.arange(6.0).view(2, 3) + 10 * index
    whole = torch.cat([torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(world)], dim=1)
    assert torch.equal(ranks.joined(own, [3] * world), whole)
    sizes, uneven = [3, *[2] * (world - 1)], own if index == 0 else own[:, :2]
    columns = [column for rank in range(world) for column in range(3 * rank, 3 * rank + sizes[rank])]
    out = torch.empty(2, sum(sizes))
    assert ranks.joined(uneven, sizes, out) is out
    assert torch.equal(out, whole[:, columns])
    residual, weight = torch.ones(2, 3), torch.full((3,), 2.0)
    normed, kept = ranks.add_norm(own.clone(), residual, weight, 1e-6)
    total = 1 + torch.stack([torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(world)]).sum(0)
    assert kept is residual
    assert torch.equal(residual, total)
    torch.testing.assert_close(normed, 2 * torch.nn.functional.rms_norm(total, (3,), eps=1e-6))
    assert ranks.share(torch.tensor([7 - index, 5])).tolist() == [7, 5]
    # In the order of the ranks and rounded once: 1 is lost beside 256 where a sum of two ranks is rounded.
    parts = [torch.full((1, 8), value, dtype=torch.bfloat16) for value in (256.0, 1.0, -256.0, 0.5)[:world]]
    assert ranks.sum(parts[index].clone()).tolist() == [[{2: 256.0, 4: 1.5}[world]] * 8]
