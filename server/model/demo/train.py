"""Train the demo model on a folder of plain-text books and write it as a Hugging Face folder.

    python -m server.model.demo.train --corpus BOOKS --out FOLDER --seed 0

Needs torch, tokenizers and safetensors, and a GPU to be done in minutes. The checkpoint of the best
held-out loss is kept.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from server.model.demo.corpus import Book, read_books
from server.model.demo.network import Network, Shape, generate, save_model
from server.model.demo.tokens import (
    CONTEXT,
    IGNORED,
    Stream,
    book_stream,
    document,
    make_chats,
    save_tokenizer,
    train_tokenizer,
)

SHORT_CONTEXT = 1024
NUM_CHATS = 8000
NUM_HELD_OUT_CHATS = 100


@dataclass(frozen=True, slots=True)
class Recipe:
    """Values that may be varied; the defaults made the model that is bundled."""

    steps: int = 3600
    minutes: float = 10.0  # stop after this long whatever the step: a guard, not the plan
    seed: int = 0
    tokens_per_step: int = 32768
    short_share: float = 0.5  # of the steps, at SHORT_CONTEXT; the rest at CONTEXT
    chat_share: float = 0.25  # of the steps
    learning_rate: float = 3e-3
    weight_decay: float = 1.0
    dropout: float = 0.25
    warmup: int = 100
    evaluate_every: int = 100


@dataclass(frozen=True, slots=True)
class Data:
    books: Stream
    chats: Stream
    held_out: list[tuple[Tensor, Tensor]]  # ids and targets of each piece, [1, tokens]
    held_out_chats: list[tuple[Tensor, Tensor]]


def prepare(books: list[Book], tokenizer: Tokenizer, seed: int) -> Data:
    paragraphs = [paragraph for book in books for paragraph in book.train]
    tails = [paragraph for book in books for paragraph in book.held_out]
    held_out = list[tuple[Tensor, Tensor]]()
    for book in books:
        ids = torch.tensor(tokenizer.encode(document(book.held_out)).ids)
        held_out += [(piece[None, :-1], piece[None, 1:]) for piece in torch.split(ids, CONTEXT) if len(piece) > 1]
    chats = make_chats(tokenizer, tails, count=NUM_HELD_OUT_CHATS, seed=seed + 1)
    generator = torch.Generator().manual_seed(seed + 1)
    return Data(
        books=book_stream(tokenizer, books),
        chats=make_chats(tokenizer, paragraphs, count=NUM_CHATS, seed=seed),
        held_out=held_out,
        held_out_chats=[chats.windows(1, SHORT_CONTEXT, generator) for _ in range(16)],
    )


def loss_of(network: Network, ids: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy in nats a target token; ids and targets [batch, tokens] int64."""
    device = network.embed_tokens.weight.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = network(ids.to(device, non_blocking=True))
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, targets.to(device).flatten(), ignore_index=IGNORED, reduction=reduction)


@torch.no_grad()
def evaluate(network: Network, pieces: list[tuple[Tensor, Tensor]]) -> float:
    network.eval()
    total = sum(float(loss_of(network, ids, targets, "sum")) for ids, targets in pieces)
    network.train()
    return total / sum(int((targets != IGNORED).sum()) for _, targets in pieces)


def optimizers(network: Network, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and, without decay, for the norms."""
    rate, decay = recipe.learning_rate, recipe.weight_decay
    matrices = [p for p in network.layers.parameters() if p.ndim == 2]
    embedding = {"params": [network.embed_tokens.weight], "weight_decay": decay}
    norms = {"params": [p for p in network.parameters() if p.ndim == 1], "weight_decay": 0.0}
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW([embedding, norms], lr=rate, betas=(0.9, 0.95))]


def rate_scale(step: int, recipe: Recipe) -> float:
    """Warm up, then fall linearly to 0: the factor on the learning rate."""
    return min((step + 1) / recipe.warmup, 1 - step / recipe.steps)


def train(network: Network, data: Data, recipe: Recipe, folder: Path) -> None:
    generator = torch.Generator().manual_seed(recipe.seed)
    parts = optimizers(network, recipe)
    best, started = float("inf"), time.monotonic()
    for step in range(recipe.steps):
        length = SHORT_CONTEXT if step < recipe.steps * recipe.short_share else CONTEXT
        is_chat = float(torch.rand((), generator=generator)) < recipe.chat_share
        stream = data.chats if is_chat else data.books
        ids, targets = stream.windows(max(1, recipe.tokens_per_step // length), length, generator)
        loss = loss_of(network, ids, targets)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for part in parts:
            for group in part.param_groups:
                group["lr"] = recipe.learning_rate * rate_scale(step, recipe)
            part.step()
            part.zero_grad(set_to_none=True)
        is_last = step + 1 == recipe.steps or time.monotonic() - started > 60 * recipe.minutes
        if is_last or (step + 1) % recipe.evaluate_every == 0:
            held_out, chats = evaluate(network, data.held_out), evaluate(network, data.held_out_chats)
            if is_best := held_out < best:
                best = held_out
                save_model(network, folder)
            losses = f"train {loss.item():.3f} held-out {held_out:.4f} chats {chats:.4f}"
            print(f"step {step + 1} {losses} {time.monotonic() - started:.0f} s{' *' if is_best else ''}", flush=True)
        if is_last:
            break
    num_tokens = (step + 1) * recipe.tokens_per_step
    print(f"best held-out loss {best:.4f} nats a token; {num_tokens / 1e6:.0f} M tokens seen of {len(data.books.ids)}")


def print_samples(network: Network, tokenizer: Tokenizer, book: Book, seed: int) -> None:
    network.eval()
    long_prompt = tokenizer.encode(document(book.train)).ids[-3000:]
    for prompt in (tokenizer.encode("Once upon a time there was a king who had").ids, long_prompt):
        generator = torch.Generator().manual_seed(seed)
        text = tokenizer.decode(generate(network, prompt, 100, 0.8, generator))
        print(f"--- after {len(prompt)} tokens, ...{tokenizer.decode(prompt[-20:])!r}:\n{text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *.txt, one book each")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    for name in ("steps", "minutes", "seed", "dropout", "weight_decay", "learning_rate", "tokens_per_step"):
        default = getattr(Recipe(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    arguments = vars(parser.parse_args())
    corpus, folder = arguments.pop("corpus"), arguments.pop("out")
    recipe = Recipe(**arguments)
    print(recipe)

    folder.mkdir(parents=True, exist_ok=True)
    books = read_books(corpus)
    tokenizer = train_tokenizer(books)
    save_tokenizer(tokenizer, folder)
    torch.manual_seed(recipe.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = Network(Shape(), recipe.dropout).to(device)
    print(f"{sum(p.numel() for p in network.parameters())} parameters on {device}")
    data = prepare(books, tokenizer, recipe.seed)
    train(network, data, recipe, folder)
    print_samples(network, tokenizer, books[-1], recipe.seed)


if __name__ == "__main__":
    main()
