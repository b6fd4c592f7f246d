"""Tiny models of the Qwen3-Embedding and Qwen3-Reranker kind served for real, beside transformers."""

from pathlib import Path

import numpy as np
import openai
import pytest
import torch
from running_server import StartServer

from server.http.pooling.rerank_prompt import RerankPrompt
from server.text.tokenizer import Tokenizer
from support.models.tiny_qwen3 import NO, YES, make_embedding_model, make_reranker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]  # a start on a busy machine takes minutes
QUICK = ("--on-unproven", "degrade")  # measures nothing
TEXTS = ["The capital of China is Beijing.", "Gravity.", "x" * 300]


def test_openais_client_gets_the_embeddings_of_transformers(start_server: StartServer, tmp_path: Path) -> None:
    model, tokenizer = make_embedding_model(tmp_path / "embed"), Tokenizer.load(tmp_path / "embed")
    prompts = [tokenizer.encode(text) for text in TEXTS]
    with torch.inference_mode():
        states = [model(torch.tensor([ids])).last_hidden_state[0, -1].numpy() for ids in prompts]
    with start_server(
        "--model", str(tmp_path / "embed"), *QUICK, "--matryoshka", "--max-num-batched-tokens", "64"
    ) as server:
        server.wait_ready()
        client = server.openai()
        for options, size in (({}, 64), ({"encoding_format": "float"}, 64), ({"dimensions": 16}, 16)):
            answer = client.embeddings.create(model="embed", input=TEXTS, **options)
            assert answer.usage.prompt_tokens == sum(map(len, prompts))
            for item, state in zip(answer.data, states, strict=True):
                expected = state[:size] / np.linalg.norm(state[:size])
                assert np.abs(np.array(item.embedding) - expected).max() < 1e-4
        with pytest.raises(openai.NotFoundError, match="'generate'"):
            client.completions.create(model="embed", prompt="a")


def test_a_ranking_has_the_probabilities_of_transformers(start_server: StartServer, tmp_path: Path) -> None:
    model, tokenizer = make_reranker(tmp_path / "score"), Tokenizer.load(tmp_path / "score")
    prompts = [RerankPrompt(tokenizer, None).token_ids("a query", text, None) for text in TEXTS]
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits[0, -1, [NO, YES]] for ids in prompts]
    expected = [float(it.softmax(0)[1]) for it in logits]
    with start_server("--model", str(tmp_path / "score"), *QUICK, "--task", "score") as server:
        server.wait_ready()
        answer = server.post("/v1/rerank", {"query": "a query", "documents": TEXTS}).json()
        scores = server.post("/v1/score", {"text_1": "a query", "text_2": TEXTS}).json()["data"]
    order = sorted(range(3), key=lambda i: -expected[i])
    assert [item["index"] for item in answer["results"]] == order
    assert [item["relevance_score"] for item in answer["results"]] == pytest.approx(
        [expected[i] for i in order], abs=1e-4
    )
    assert [item["score"] for item in scores] == pytest.approx(expected, abs=1e-4)
