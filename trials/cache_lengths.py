"""Measure what a KV cache of 8 bits costs by length: errors of attention, and retrieval of a planted key.

PYTHONPATH=. python trials/cache_lengths.py [--most 131072] [--seeds 4] [--out docs/benchmarks/cache-lengths-cpu.json]

Heads are Llama-3.1-8B's (32:8, d128), keys rotated as there, four dims of each eight times as large as the others, as
keys' outliers are. Among the keys of a sequence one is planted which the query asks for, its score about the logarithm
of the length above the others', and 15 that resemble it (a cosine of 0.9). A query finds it where, of these 16 keys'
values, the planted one's is the most alike the result. One run writes the keys as a prompt, another token by token as
they are generated; the bytes of both must be equal. Errors are of all 32 heads' results, over the truth's norm: `error`
against fp64 over the keys and values before they were rounded to the cache's dtype, `of the kernel` over those behind.
"""

import argparse
import json
import math
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from bench.machine import commit_of_code, machine_of
from kernels.calls.batch import AttentionBatch, AttentionFlags
from kernels.catalog import path_named
from kernels.fp8_cache import pages as fp8_pages
from kernels.fused.rope_kv import rope_and_write_kv
from kernels.reference.oracle import attention_oracle
from kernels.system.device import read_fingerprint

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 64
LEAST, DECOYS, COSINE, THETA = 1024, 15, 0.9, 500_000.0
PATHS = {
    "cuda": {"bf16": "gluon.decode.hopper", "fp8": "gluon.decode.fp8.hopper"},
    "cpu": {"bf16": "sdpa.cpu", "fp8": "sdpa.cpu.fp8"},
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sequence.

    q       [1, heads, d], rotated, and k, v [T, kv_heads, d] before the rotation, bf16
    places  [16, kv_heads]: first where each KV head's planted key is, then those that resemble it
    """

    q: Tensor
    k: Tensor
    v: Tensor
    places: Tensor


def rotations(num_tokens: int, device: torch.device) -> Tensor:
    """Return [T, d] fp32: cosines, then sines."""
    angle = torch.arange(num_tokens, device=device)[:, None] * THETA ** (
        -torch.arange(0, DIM, 2, device=device).double() / DIM
    )
    return torch.cat((angle.cos(), angle.sin()), dim=1).float()


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate x [T, heads, d] fp32."""
    cos, sin = (it[:, None] for it in cos_sin.chunk(2, dim=1))
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def drawn(num_tokens: int, seed: int, cos_sin: Tensor) -> Drawn:
    device = cos_sin.device
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    sizes = torch.ones(DIM, device=device)
    sizes[torch.randperm(DIM, generator=generator, device=device)[:4]] = 8
    k, v = normal(num_tokens, KV_HEADS, DIM) * sizes, normal(num_tokens, KV_HEADS, DIM)
    places = torch.stack(
        [torch.randperm(num_tokens, generator=generator, device=device)[: DECOYS + 1] for _ in range(KV_HEADS)], dim=1
    )
    wanted = torch.nn.functional.normalize(normal(KV_HEADS, DIM), dim=-1) * DIM**0.5
    heads = torch.arange(KV_HEADS, device=device)
    # In the rotated space, where queries ask: turned back to their positions before they are written.
    others = torch.nn.functional.normalize(normal(DECOYS, KV_HEADS, DIM), dim=-1) * DIM**0.5
    planted = torch.cat((wanted[None], COSINE * wanted + (1 - COSINE**2) ** 0.5 * others))
    for row, place in zip(planted, places, strict=True):
        back = cos_sin[place] * torch.cat((torch.ones(DIM // 2), -torch.ones(DIM // 2))).to(device)
        k[place, heads] = rotated(row[:, None], back)[:, 0]
    score = math.log(num_tokens) + 2.0
    q = wanted.repeat_interleave(HEADS // KV_HEADS, dim=0) * (score / DIM**0.5) + 0.3 * normal(HEADS, DIM)
    return Drawn(q[None].bfloat16(), k.bfloat16(), v.bfloat16(), places)


def written(given: Drawn, cos_sin: Tensor, kind: str, *, step: int) -> tuple[Tensor, Tensor]:
    """Return pages of a sequence's keys and values, written `step` tokens at a time."""
    num_tokens, device = given.k.shape[0], given.k.device
    shape = num_tokens // PAGE, PAGE, KV_HEADS, DIM
    if kind == "fp8":
        held = tuple(fp8_pages.allocate(*shape, device) for _ in range(2))
    else:
        held = tuple(torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    k, v, q = given.k.clone(), given.v.clone(), torch.zeros_like(given.k)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=device)
    for first in range(0, num_tokens, step):
        own = slice(first, first + step)
        rope_and_write_kv(q[own], k[own], v[own], cos_sin, positions[own], *held, positions[own].long())
    return held[0], held[1]


def found(given: Drawn, held: tuple[Tensor, Tensor], kind: str) -> tuple[Tensor, AttentionBatch, AttentionFlags]:
    """Return the result [1, heads, d] of the path that serves, and what it was given."""
    num_tokens, device = given.k.shape[0], given.k.device
    batch = AttentionBatch(
        torch.tensor([0, 1], dtype=torch.int32, device=device), 1, num_tokens,
        page_table=torch.arange(num_tokens // PAGE, dtype=torch.int32, device=device)[None],
        context_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
    )  # fmt: skip
    flags, out = AttentionFlags(DIM**-0.5), torch.empty_like(given.q)
    run = path_named(PATHS[device.type][kind]).run
    assert run is not None
    run(given.q, *held, batch, flags, out)
    return out, batch, flags


def measured(num_tokens: int, seed: int, kinds: tuple[str, ...], device: torch.device) -> dict[str, dict[str, float]]:
    """Return errors and the share of heads that find the planted key, by kind of cache."""
    cos_sin = rotations(num_tokens, device)
    given = drawn(num_tokens, seed, cos_sin)
    precise = rotated(given.k.float(), cos_sin), given.v.float()
    values = given.v.float()[given.places, torch.arange(KV_HEADS, device=device)]  # [16, kv_heads, d]
    numbers = {}
    for kind in kinds:
        held = written(given, cos_sin, kind, step=num_tokens)
        out, batch, flags = found(given, held, kind)
        packed = AttentionBatch(batch.cu_seqlens_q, 1, num_tokens, cu_seqlens_k=batch.cu_seqlens_q * num_tokens)
        truth = attention_oracle(given.q, *precise, packed, flags)
        read = tuple(fp8_pages.dequantized(it, torch.float64) for it in held) if kind == "fp8" else held
        of_kernel = attention_oracle(given.q, *read, batch, flags)
        grouped = out.float().view(KV_HEADS, HEADS // KV_HEADS, DIM)
        alike = torch.cosine_similarity(grouped[None], values[:, :, None], dim=-1)  # [16, kv_heads, group]
        again = written(given, cos_sin, kind, step=1) if num_tokens <= 16384 or device.type == "cuda" else held
        pairs = zip(again, held, strict=True)
        numbers[kind] = {
            "error": float((out - truth).norm() / truth.norm()),
            "of the kernel": float((out - of_kernel).norm() / of_kernel.norm()),
            "found": float((alike.argmax(dim=0) == 0).float().mean()),
            "bytes of generated keys that differ": sum(
                int((one.view(torch.uint8) != other.view(torch.uint8)).sum()) for one, other in pairs
            ),
        }
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=131072, help="keys of a sequence")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, object]] = []
    for length in [LEAST << power for power in range((asked.most // LEAST).bit_length())]:
        each = [measured(length, seed, ("bf16", "fp8"), device) for seed in range(asked.seeds)]
        for kind in ("bf16", "fp8"):
            worst = {name: max(it[kind][name] for it in each) for name in each[0][kind]}
            worst["found"] = sum(it[kind]["found"] for it in each) / len(each)
            rows.append({"keys": length, "cache": kind, **{name: float(f"{it:.3g}") for name, it in worst.items()}})
            print(rows[-1], flush=True)
    if asked.out is not None:
        head = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": "PYTHONPATH=. python trials/cache_lengths.py",
            "commit": commit_of_code(),
            "machine": machine_of(read_fingerprint(device), device),
        }
        asked.out.write_text(json.dumps({**head, "seeds": asked.seeds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
