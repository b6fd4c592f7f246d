"""Time the tower of Qwen2.5-VL-7B's sizes on a GPU: as a whole beside transformers', and its attention by path.

PYTHONPATH=. python trials/tower_times.py --out FILE        random weights, one image of 1024 x 1024 pixels, bf16

The image is resized to 1036 x 1036: 74 x 74 patches, in 28 of 32 layers in 100 windows. Times are by CUDA events with a
cold L2: the median, the least and the most. Both towers run eagerly and have the same weights; the least cosine between
rows of their results is given. transformers is left out where it cannot be imported.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kernels.functional import plan_varlen
from kernels.fused.activation_kind import Activation
from qualification.model.families.qwen_towers import QWEN_2_5_NAMES
from qualification.model.tower import TowerConfig
from server.model.vision.geometry import Geometry
from server.model.vision.tower import Image, Pixels, Tower
from server.model.vision.weights import as_computed, empty_tower

CONFIG = TowerConfig(
    num_layers=32,
    hidden_size=1280,
    num_heads=16,
    width=3420,
    activation=Activation.SILU,
    is_gated=True,
    has_rms_norms=True,
    has_patch_bias=False,
    patch_size=14,
    num_frames=2,
    merge=2,
    out_size=3584,
    names=QWEN_2_5_NAMES,
    window=4,
    full_layers=frozenset({7, 15, 23, 31}),
)
PIXELS = Pixels((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
GRID = (74, 74)
PATHS = ("gluon.prefill.unmasked.hopper", "triton.prefill", "sdpa.flash", "sdpa.cudnn")


def timed(call: Callable[[], object], num: int = 20) -> dict[str, float]:
    """Return microseconds of a call."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        call()
    samples = []
    for _ in range(num):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        samples.append(1000 * start.elapsed_time(stop))
    samples.sort()
    return {"p50_us": round(samples[num // 2], 1), "least_us": round(samples[0], 1), "most_us": round(samples[-1], 1)}


def peer() -> torch.nn.Module | None:
    """Return transformers' tower with PyTorch's attention; None where it cannot be imported."""
    try:
        from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
    except ImportError as error:
        print(f"transformers is left out: {error}", file=sys.stderr)
        return None
    config = Qwen2_5_VLVisionConfig(
        depth=32, hidden_size=1280, num_heads=16, intermediate_size=3420, out_hidden_size=3584, window_size=112,
        fullatt_block_indexes=[7, 15, 23, 31], hidden_act="silu",
    )  # fmt: skip
    made = Qwen2_5_VisionTransformerPretrainedModel._from_config(config, attn_implementation="sdpa")
    found: torch.nn.Module = made.to("cuda", torch.bfloat16).eval()
    return found


def tower_of(weights: Mapping[str, torch.Tensor]) -> Tower:
    """Return our tower with these weights; with none, random ones."""
    found = empty_tower(CONFIG, torch.bfloat16, torch.device("cuda"))
    for name, target in found.named(CONFIG).items():
        if weights:
            target.copy_(weights[name.removeprefix("visual.")].reshape(target.shape))
        else:
            target.normal_(std=0.02)
    return Tower(CONFIG, as_computed(found, CONFIG), PIXELS, is_reproducible=False)


def patches_of(image: Image) -> torch.Tensor:
    """Return an image's patches as transformers' processor orders them."""
    mean, deviation = (255 * torch.tensor(it, device="cuda") for it in (PIXELS.mean, PIXELS.deviation))
    numbers = ((image.pixels.cuda().float() - mean) / deviation).permute(2, 0, 1)[None].repeat(2, 1, 1, 1)
    (height, width), side = GRID, CONFIG.patch_size
    blocks = numbers.reshape(2, 3, height // 2, 2, side, width // 2, 2, side).permute(2, 5, 3, 6, 1, 0, 4, 7)
    return blocks.reshape(height * width, -1).to(torch.bfloat16)


@torch.inference_mode()
def rows() -> list[dict[str, Any]]:
    """Measure everything, and print each row."""
    found: list[dict[str, Any]] = []

    def say(**row: Any) -> None:
        found.append(row)
        print(json.dumps(row), flush=True)

    theirs = peer()
    own = tower_of({} if theirs is None else theirs.state_dict())
    generator = torch.Generator().manual_seed(0)
    shape = (GRID[0] * CONFIG.patch_size, GRID[1] * CONFIG.patch_size, 3)
    image = Image(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).pin_memory(), GRID)
    say(what="tower", who="ours", **timed(lambda: own.encode([image])))
    if theirs is not None:
        patches, grid = patches_of(image), torch.tensor([[1, *GRID]], device="cuda")
        result = theirs(patches, grid_thw=grid).pooler_output
        cosines = torch.nn.functional.cosine_similarity(result.float(), own.encode([image]).float(), dim=1)
        say(what="agreement", least_cosine=cosines.min().item())
        say(what="tower", who="transformers, sdpa", **timed(lambda: theirs(patches, grid_thw=grid), num=8))
    heads, dim, num = CONFIG.num_heads, CONFIG.head_dim, GRID[0] * GRID[1]
    q, k, v = (it.view(num, heads, dim) for it in torch.randn(num, 3 * heads * dim).cuda().bfloat16().chunk(3, 1))
    out = torch.empty(num, heads, dim, dtype=torch.bfloat16, device="cuda")
    for of, lengths in (("an image", (num,)), ("windows", Geometry.of(CONFIG, [GRID]).windows)):
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
        for path in PATHS if of == "an image" else PATHS[:2]:  # the others walk windows one by one, and wait for each
            plan = plan_varlen(ends, ends, max(lengths), max(lengths), causal=False, path=path)
            say(what="attention", of=of, path=path, **timed(lambda plan=plan: plan.run(q, k, v, out=out)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {
        "what": "tower of Qwen2.5-VL-7B's sizes, one image of 1024 x 1024 pixels, bf16",
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}",
        "rows": rows(),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
