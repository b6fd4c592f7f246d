"""Quantised checkpoints of tests: the parts of each product, and another word in config.json."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from server.model.linear import WeightName

PARTS = {
    WeightName.QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    WeightName.OUTPUT: ("self_attn.o_proj",),
    WeightName.GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
    WeightName.DOWN: ("mlp.down_proj",),
}

_PRODUCTS = ("_proj.weight", "_with_mqa.weight", "query_key_value.weight", "dense.weight")


def words_of(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    """Pack eight codes of a row [rows, 8 n] in an integer: code i in the bits from 4 * order[i] on."""
    found = sum(codes[:, i::8].long() << 4 * place for i, place in enumerate(order))
    assert isinstance(found, Tensor)
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32).contiguous()


IN_ORDER = tuple(range(8))


def awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    return {
        "qweight": words_of(codes.T, order), "qzeros": words_of(zeros.T, order), "scales": scales.T.contiguous().half()
    }  # fmt: skip


def gptq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    columns = codes.shape[1]
    return {
        "qweight": words_of(codes, IN_ORDER).T.contiguous(), "qzeros": words_of(zeros.T, IN_ORDER),
        "scales": scales.T.contiguous().half(),
        "g_idx": torch.tensor([it // (columns // scales.shape[1]) for it in range(columns)], dtype=torch.int32),
    }  # fmt: skip


def gptq_v1(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Return the tensors as GPTQModel writes them: ones taken from eight packed zero points as from one number."""
    found = gptq(codes, zeros, scales)
    return found | {"qzeros": found["qzeros"] - 0x11111111}


def compressed(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    found = {"weight_packed": words_of(codes, IN_ORDER), "weight_scale": scales.bfloat16()}
    return found | {
        "weight_zero_point": words_of(zeros.T, IN_ORDER).T.contiguous(), "weight_shape": torch.tensor(codes.shape)
    }  # fmt: skip


def compressed_symmetric(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    found = compressed(codes, zeros, scales)
    del found["weight_zero_point"]
    return found


def change(folder: Path, **says: object) -> None:
    """Change words of quantization_config."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] |= says
    path.write_text(json.dumps(values))


def in_8_bits(kind: str, listed: str) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]]:
    """Give each product codes and scales, by blocks, rows or static; not those with `listed` in their names."""

    def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(tensors)
        for name, values in tensors.items():
            if not name.endswith(_PRODUCTS) or listed in name:
                continue
            step = 128 if kind == "blocks" else 10**6
            tops, lefts = range(0, values.shape[0], step), range(0, values.shape[1], step)
            codes, scales = torch.empty(values.shape, dtype=torch.float8_e4m3fn), torch.empty(len(tops), len(lefts))
            for i, top in enumerate(tops):
                for j, left in enumerate(lefts):
                    # Blocks differ in size, so that another one's scale shows.
                    block = values[top : top + step, left : left + step].float() * (1 + (i + 2 * j) % 3)
                    scales[i, j] = block.abs().max() / 448
                    codes[top : top + step, left : left + step] = (block / scales[i, j]).to(torch.float8_e4m3fn)
            product = name.removesuffix(".weight")
            found[name] = codes
            if kind == "blocks":
                found[f"{product}.weight_scale_inv"] = scales
            else:
                found[f"{product}.weight_scale"] = scales.reshape(())
            if kind == "static":
                found[f"{product}.input_scale"] = torch.tensor(0.004)
        return found

    return rounded
