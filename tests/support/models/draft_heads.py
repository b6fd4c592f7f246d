"""Draft heads of small random models: their tensors beside those of a saved model, and the head computed plainly."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_FILE = "model.safetensors"
_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def add_draft_head(folder: Path, num_layers: int) -> dict[str, Tensor]:
    """Give a saved model, whose last layer attends, a random draft head; return the head's tensors."""
    tensors, draw = load_file(folder / _FILE), torch.Generator().manual_seed(1)
    hidden, last = tensors["model.norm.weight"].shape[0], f"model.layers.{num_layers - 1}."
    shapes = {f"layers.0.{name.removeprefix(last)}": it.shape for name, it in tensors.items() if name.startswith(last)}
    shapes |= {
        "fc.weight": torch.Size((hidden, 2 * hidden)),
        **{f"{it}.weight": torch.Size((hidden,)) for it in _NORMS},
    }
    head = {f"mtp.{name}": 0.2 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    save_file({**tensors, **head}, folder / _FILE, metadata={"format": "pt"})
    return head


class PlainHead:
    """The head by the layer of transformers' class, whole sequences at a time, without a cache."""

    def __init__(self, model: Any, tensors: dict[str, Tensor]) -> None:
        self._model = model
        self._tensors = tensors
        self._layer = copy.deepcopy(model.model.layers[-1])
        prefix = "mtp.layers.0."
        own = {name.removeprefix(prefix): it for name, it in tensors.items() if name.startswith(prefix)}
        self._layer.load_state_dict(own)

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the likeliest tokens that the head drafts behind `tokens`, each behind the one before."""
        inner = self._model.model
        ids = torch.tensor([list(tokens)])
        hidden, embedded = inner(ids[:, :-1]).last_hidden_state, inner.embed_tokens(ids[:, 1:])
        found: list[int] = []
        for _ in range(count):
            both = torch.cat((self._norm(embedded, _NORMS[0]), self._norm(hidden, _NORMS[1])), dim=2)
            x = both @ self._tensors["mtp.fc.weight"].T
            places = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
            turns = inner.rotary_emb(x, places)
            out = self._layer(x, position_embeddings=turns, attention_mask=mask, position_ids=places)
            last = self._norm((out[0] if isinstance(out, tuple) else out)[:, -1:], _NORMS[2])
            token = self._model.lm_head(last).argmax(dim=-1)
            found.append(int(token))
            hidden, embedded = torch.cat((hidden, last), dim=1), torch.cat((embedded, inner.embed_tokens(token)), dim=1)
        return found

    def _norm(self, x: Tensor, name: str) -> Tensor:
        root = (x.square().mean(dim=-1, keepdim=True) + self._model.config.rms_norm_eps).rsqrt()
        found: Tensor = x * root * (1 + self._tensors[f"mtp.{name}.weight"])
        return found
