"""The demo model against transformers on the same folder: float32, greedy, token for token."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from running_server import DEMO, ROOT, Server
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a start on a busy machine takes minutes
LENGTHS = (1, 2, 15, 16, 17, 64, 128, 129, 513, 2049)
NUM_NEW = 12


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """English of this repository, cut to each length from a place of its own."""
    text = Path(ROOT, "LICENSE").read_text()
    ids: list[int] = tokenizer.encode(text * 3, add_special_tokens=False).ids
    assert len(ids) > max(LENGTHS) + 100
    return [ids[5 * i : 5 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    """Return what transformers writes after each prompt."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    found = []
    for ids in prompts:
        tokens = torch.tensor([ids])
        options = {"max_new_tokens": NUM_NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with torch.inference_mode():
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        found.append(out[0, len(ids) :].tolist())
    return found


def complete(server: Server, prompt: list[int]) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), NUM_NEW)
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_greedy_text_alone_equals_that_of_transformers(
    demo: Server, prompts: list[list[int]], expected: list[list[int]], tokenizer: Tokenizer
) -> None:
    assert [complete(demo, prompt) for prompt in prompts] == [tokenizer.decode(ids) for ids in expected]


def test_greedy_text_at_once_equals_that_of_transformers(
    demo: Server, prompts: list[list[int]], expected: list[list[int]], tokenizer: Tokenizer
) -> None:
    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(lambda prompt: complete(demo, prompt), prompts))
    assert texts == [tokenizer.decode(ids) for ids in expected]
