"""The demo model's byte-level BPE tokenizer, and the corpus as token ids."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from server.model.demo.corpus import Book, Conversation, ConversationMaker

VOCAB_SIZE = 4096
CONTEXT = 4096
SPECIALS = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
BOS, END = SPECIALS[0], SPECIALS[-1]
IGNORED = -100  # target of a position that is not trained on

# Words with their leading space; runs of line breaks are one token.
WORDS = r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(books: list[Book]) -> Tokenizer:
    """Learn the merges from the training part of the books; the same books give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(text, special=True) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document(book.train) for book in books), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": BOS,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "added_tokens_decoder": {str(index): {"content": text, "special": True} for index, text in enumerate(SPECIALS)},
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def document(paragraphs: list[str]) -> str:
    return "\n\n".join(paragraphs)


@dataclass(frozen=True, slots=True)
class Stream:
    """Documents laid end to end: ids and targets are [tokens] int64, starts the offsets at which a window may begin."""

    ids: Tensor
    targets: Tensor
    starts: Tensor

    def windows(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw `count` windows: ids and their next-token targets, both [count, length] int64."""
        allowed = self.starts[self.starts + length + 1 <= len(self.ids)]
        picked = allowed[torch.randint(len(allowed), (count,), generator=generator)]
        spans = picked[:, None] + torch.arange(length)
        return self.ids[spans], self.targets[spans + 1]


def book_stream(tokenizer: Tokenizer, books: list[Book]) -> Stream:
    """Every book after a <|endoftext|>; all tokens are targets and a window may begin at each."""
    ids = [i for book in books for i in tokenizer.encode(BOS + document(book.train)).ids]
    tokens = torch.tensor(ids)
    return Stream(tokens, tokens, torch.arange(len(ids)))


def chat_stream(tokenizer: Tokenizer, conversations: list[Conversation]) -> Stream:
    """Conversations after each other; only what the assistant says is a target, and a window begins with one."""
    ids, targets, starts = list[int](), list[int](), list[int]()
    for conversation in conversations:
        starts.append(len(ids))
        for role, text in conversation:
            head = tokenizer.encode(f"<|{role}|>").ids
            body = tokenizer.encode(text + END).ids
            ids += head + body
            targets += [IGNORED] * len(head) + (body if role == "assistant" else [IGNORED] * len(body))
        ids += tokenizer.encode(BOS).ids
        targets.append(IGNORED)
    return Stream(torch.tensor(ids), torch.tensor(targets), torch.tensor(starts))


def make_chats(tokenizer: Tokenizer, paragraphs: list[str], *, count: int, seed: int) -> Stream:
    maker = ConversationMaker(paragraphs, random.Random(seed))
    return chat_stream(tokenizer, [maker.draw() for _ in range(count)])
