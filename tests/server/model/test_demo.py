"""The bundled model is an ordinary Hugging Face folder that writes English, and its scripts can make it again."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from server.model.demo.corpus import ConversationMaker, clean, split_tail
from server.model.demo.network import Network, Shape, save_model
from server.model.demo.tokens import BOS, END, IGNORED, SPECIALS, book_stream, chat_stream, train_tokenizer
from server.settings import DEMO_MODEL
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer

MAX_FOLDER_BYTES = 14_000_000
PARAGRAPHS = [
    f'There was once a king who had {n} sons, and the eldest went with Hans into the forest. "Go," said he.' * 2
    for n in range(40)
]


@pytest.fixture(scope="module")
def demo() -> Iterator[Any]:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    with torch.no_grad():
        yield model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL)


def nats_per_token(model: Any, token_ids: list[int], num_scored: int) -> float:
    """Mean loss of the last `num_scored` tokens given all before them."""
    logits = model(torch.tensor([token_ids])).logits[0, -num_scored - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(token_ids[-num_scored:])))


def test_the_folder_is_small_enough_to_be_cloned_with_the_code() -> None:
    assert sum(file.stat().st_size for file in DEMO_MODEL.iterdir() if file.is_file()) <= MAX_FOLDER_BYTES


def test_the_weights_are_bf16_and_as_many_as_the_card_says() -> None:
    with safe_open(DEMO_MODEL / "model.safetensors", "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 it is no dict
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert f"{sum(tensor.numel() for tensor in tensors):,};" in (DEMO_MODEL / "README.md").read_text()


def test_untrained_words_cost_far_less_than_chance(demo: Any, tokenizer: Tokenizer) -> None:
    text = "The old king said to his daughter that she should go into the forest and look for her brother."
    # A uniform guess costs ln 4096 = 8.3 nats; the held-out books cost 3.6.
    assert nats_per_token(demo, tokenizer.encode(text), 15) < 4.5


def test_shuffled_words_cost_more_than_english(demo: Any, tokenizer: Tokenizer) -> None:
    text = "The old king said to his daughter that she should go into the forest and look for her brother."
    english = nats_per_token(demo, tokenizer.encode(text), 15)
    words = text.split()
    random.Random(0).shuffle(words)
    assert nats_per_token(demo, tokenizer.encode(" ".join(words)), 15) > english + 1.0


def test_a_prompt_of_3000_tokens_helps(demo: Any, tokenizer: Tokenizer) -> None:
    line = " The captain of the Nautilus looked at the chart of the ocean and said nothing to Ned Land for an hour."
    line_ids = tokenizer.encode(line)
    alone = nats_per_token(demo, line_ids, len(line_ids) - 1)
    token_ids = (line_ids * (3000 // len(line_ids) + 1))[-3000:]
    assert nats_per_token(demo, token_ids, len(line_ids) - 1) < alone - 0.5


def test_a_greeting_is_answered_and_the_answer_ends(demo: Any, tokenizer: Tokenizer) -> None:
    template = ChatTemplate.load(DEMO_MODEL)
    assert template is not None
    prompt = tokenizer.encode(template.render([{"role": "user", "content": "Hello!"}]), add_special_tokens=False)
    output = demo.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False)[0, len(prompt) :].tolist()
    assert output[-1] == tokenizer.encode(END)[0]
    assert "old books" in tokenizer.decode(output)


def test_tokens_and_prompts_are_those_of_transformers(tokenizer: Tokenizer) -> None:
    reference = AutoTokenizer.from_pretrained(DEMO_MODEL)
    template = ChatTemplate.load(DEMO_MODEL)
    assert template is not None
    for text in ("Once upon a time—", "  two\n\nlines ", "naïve 漢字 😀 e\u0301", "1600 whales' <|end|>"):
        assert tokenizer.encode(text) == reference(text).input_ids
        messages = [{"role": "system", "content": "Old."}, {"role": "user", "content": text}]
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert template.render(messages) == expected


@pytest.mark.parametrize("text", ["Once upon a time—", "  two\n\nlines ", "naïve 漢字 😀 e\u0301", "\u200b\ttab"])
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_have_the_ids_that_the_configs_name() -> None:
    tokenizer = Tokenizer.load(DEMO_MODEL)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    ids = [tokenizer.encode(text) for text in SPECIALS]
    assert ids == [[0], [1], [2], [3], [4]]
    assert config["bos_token_id"] == SPECIALS.index(BOS)
    assert config["eos_token_id"] == [SPECIALS.index(BOS), SPECIALS.index(END)]


def test_cleaning_joins_prose_and_keeps_verse() -> None:
    prose = "It was a dark evening and the wind came in from the sea with\r\nall its strength, and nobody slept.\r\n"
    long = ("He walked on and on through the old forest, until evening.\r\n" * 6).strip()
    verse = "We know't, we know't.\r\nLet us kill him.\r\n"
    text = f"A TITLE\r\n\r\nby Somebody\r\n\r\n{long}\r\n\r\n[Illustration]\r\n\r\n{prose}\r\n{verse}\r\n“Oh--_no_!”"
    first, *rest = clean(text)
    assert first.startswith("He walked on")
    assert "\n" not in first
    assert rest == [
        "It was a dark evening and the wind came in from the sea with all its strength, and nobody slept.",
        "We know't, we know't.\nLet us kill him.",
        '"Oh—no!"',
    ]


def test_the_held_out_part_is_the_end_of_the_book() -> None:
    book = split_tail(PARAGRAPHS)
    assert book.train + book.held_out == PARAGRAPHS
    assert len(book.held_out) == 1  # 2% of 40 paragraphs of about one length


def test_conversations_of_a_seed_are_the_same() -> None:
    def draw(seed: int) -> list[list[tuple[str, str]]]:
        maker = ConversationMaker(PARAGRAPHS, random.Random(seed))
        return [maker.draw() for _ in range(50)]

    assert draw(1) == draw(1) != draw(2)
    for conversation in draw(1):
        roles = [role for role, _ in conversation if role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(text for _, text in conversation)


def test_only_what_the_assistant_says_is_a_target() -> None:
    tokenizer = train_tokenizer([split_tail(PARAGRAPHS)])
    stream = chat_stream(tokenizer, [[("user", "Who was it?"), ("assistant", "A king.")]])
    targets = stream.targets[stream.targets != IGNORED].tolist()
    assert targets == tokenizer.encode("A king." + END).ids
    assert stream.starts.tolist() == [0]


def test_targets_of_a_window_are_its_next_tokens() -> None:
    stream = book_stream(train_tokenizer([split_tail(PARAGRAPHS)]), [split_tail(PARAGRAPHS)])
    ids, targets = stream.windows(3, 16, torch.Generator().manual_seed(0))
    assert ids.shape == (3, 16)
    assert torch.equal(ids[:, 1:], targets[:, :-1])


def test_a_saved_network_gives_the_same_logits_in_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = Network(Shape(vocab_size=64, hidden_size=128, num_hidden_layers=2, max_position_embeddings=64), 0.0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(parameter.bfloat16())  # what is saved is what is compared
        save_model(network, tmp_path)
        ids = torch.randint(64, (1, 50))
        reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        torch.testing.assert_close(network.eval()(ids), reference(ids).logits, atol=1e-5, rtol=1e-4)
