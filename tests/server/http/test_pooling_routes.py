"""Embeddings, scores and ranks over HTTP, of an engine that follows a script."""

import base64
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from server.errors import ModelError
from server.http.pooling import schemas
from server.http.pooling.answers import probability_of
from server.http.pooling.rerank_prompt import RerankPrompt
from server.model.load.pooling import PoolingModel
from server.protocol.messages import FinishReason, Pooling, TokenDelta
from server.settings import Settings, Task
from server.text.tokenizer import Tokenizer
from support.api.edge_fakes import TIMES, USES, ScriptedEngine, Served, make_services, served, with_model
from support.models.tiny_qwen3 import NO, YES, write_words

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
EMBED = PoolingModel(Task.EMBED, dimensions=range(1, 5))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words")
    write_words(path)
    return path


def vector_of(prompt: list[int]) -> list[float]:
    return [3.0, 4.0, float(len(prompt)), float(prompt[0])]


def pooling(folder: Path, model: PoolingModel) -> Served:
    """A served model whose vectors tell the prompt; of a score, the logit of yes grows with the prompt's length."""

    def script(prompt: list[int]) -> list[TokenDelta]:
        values = vector_of(prompt) if model.task is Task.EMBED else [len(prompt) / 100, 2.0]
        pooled = np.array(values, "<f4").tobytes()
        return [TokenDelta("", [], FinishReason.LENGTH, times=TIMES, path_uses=USES, pooled=pooled)]

    engine = ScriptedEngine(script)
    return Served(with_model(make_services(folder, engine, Settings(model="tiny")), pooling=model), engine)


def test_embeddings_are_normalized_and_counted(words: Path) -> None:
    it = pooling(words, EMBED)
    answer = it.post(EMBEDDINGS, {"input": ["ab", "c"], "model": "tiny", "user": "u"}).json()
    schemas.EmbeddingList.model_validate(answer, strict=False)
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}  # <|end|> is appended to both
    assert [prompt for _, prompt, _ in it.engine.submitted] == [[97, 98, 256], [99, 256]]
    assert it.engine.submitted[0][2].pooling == Pooling()
    for item, prompt in zip(answer["data"], ([97, 98, 256], [99, 256]), strict=True):
        expected = np.array(vector_of(prompt)) / np.linalg.norm(vector_of(prompt))
        assert item["embedding"] == pytest.approx(expected, abs=1e-6)
    assert it.value("prompt_tokens_total") == 5
    assert it.value("generation_tokens_total") == 0


@pytest.mark.parametrize(
    ("task", "route", "body"),
    [
        (Task.EMBED, EMBEDDINGS, {"input": ["ab", "c"]}),
        (Task.SCORE, SCORE, {"text_1": "q", "text_2": ["a", "b"]}),
        (Task.SCORE, RERANK, {"query": "q", "documents": ["a", "b"]}),
    ],
)
def test_pooled_answers_name_their_kernels_where_asked(
    words: Path, task: Task, route: str, body: dict[str, object]
) -> None:
    it = pooling(words, PoolingModel(task))
    plain = it.post(route, body)
    assert plain.headers["x-hallmark-status"] == "provisional"
    assert "hallmark" not in plain.json()
    by_field, by_header = it.post(route, {**body, "hallmark": True}), it.post(route, body, headers={"X-Hallmark": "1"})
    for answer in (by_field.json(), by_header.json()):
        assert [phase["path"] for phase in answer["hallmark"]["phases"]] == [use.path for use in USES]
        assert answer["hallmark"]["bucket"] == ("le_128" if task is Task.EMBED else "le_512")
        model = {EMBEDDINGS: schemas.EmbeddingList, SCORE: schemas.ScoreList, RERANK: schemas.Reranked}[route]
        model.model_validate(answer, strict=False)
    assert it.post(route, body, headers={"X-Hallmark": "yes"}).status_code == 400


def test_token_ids_are_taken_as_they_are_and_bytes_are_fp32(words: Path) -> None:
    it = pooling(words, replace(EMBED, normalizes=False))
    answer = it.post(EMBEDDINGS, {"input": [[1, 2], [3]], "encoding_format": "base64"}).json()
    vectors = [np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist() for item in answer["data"]]
    assert vectors == [vector_of([1, 2]), vector_of([3])]
    assert it.post(EMBEDDINGS, {"input": [1, 2]}).json()["data"][0]["embedding"] == vector_of([1, 2])


@pytest.mark.parametrize("normalizes", [True, False])
def test_shorter_embeddings_are_cut_and_normalized_again(normalizes: bool, words: Path) -> None:
    body = {"input": "ab", "dimensions": 2}
    answer = pooling(words, replace(EMBED, normalizes=normalizes)).post(EMBEDDINGS, body).json()
    assert answer["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    for model, message in ((PoolingModel(Task.EMBED), "cannot be chosen"), (EMBED, "must be 1 to 4, got 5")):
        refused = pooling(words, model).post(EMBEDDINGS, body | {"dimensions": 5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")
        assert message in refused.json()["error"]["message"]


def test_the_length_that_embeddings_have_may_be_asked_for(words: Path) -> None:
    model = PoolingModel(Task.EMBED, size=4)
    plain, asked = [
        pooling(words, model).post(EMBEDDINGS, {"input": "ab", **fields}).json() for fields in ({}, {"dimensions": 4})
    ]
    assert asked == plain
    refused = pooling(words, model).post(EMBEDDINGS, {"input": "ab", "dimensions": 2}).json()["error"]
    assert (refused["param"], "have 4 numbers, got 2" in refused["message"]) == ("dimensions", True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [[320]]}, "input"),
        ({"input": [5] * 1025}, "input"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),  # the end token alone would be left
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(words: Path, body: dict[str, object], param: str) -> None:
    refused = pooling(words, EMBED).post(EMBEDDINGS, body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [*b"ab", 256]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, [*b"cd", 256]),
        ({"truncate_prompt_tokens": 3, "add_special_tokens": False}, [*b"abc"]),
        ({"truncate_prompt_tokens": 5}, [*b"abcd", 256]),
        ({"truncate_prompt_tokens": -1, "input": "a" * 2000}, [*b"a" * 1023, 256]),
        ({"truncate_prompt_tokens": 1, "input": [1, 2, 3]}, [1]),
        ({"truncate_prompt_tokens": 3, "input": "ab" + "c" * 300_000}, [*b"ab", 256]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left", "input": "c" * 300_000 + "ab"}, [*b"ab", 256]),
    ],
)
def test_a_cut_input_keeps_the_token_that_is_pooled(words: Path, fields: dict[str, object], kept: list[int]) -> None:
    it = pooling(words, EMBED)
    assert it.post(EMBEDDINGS, {"input": "abcd", **fields}).status_code == 200
    assert [prompt for _, prompt, _ in it.engine.submitted] == [kept]


def test_documents_are_ranked_by_qwen3s_prompt(words: Path) -> None:
    it = pooling(words, PoolingModel(Task.SCORE))
    documents = ["short", "a longer document", "mid size"]
    answer = it.post(RERANK, {"query": "q", "documents": documents, "top_n": 2}).json()
    schemas.Reranked.model_validate(answer, strict=False)
    assert [(item["index"], item["document"]["text"]) for item in answer["results"]] == [
        (1, documents[1]),
        (2, documents[2]),
    ]
    prompt, sampling = it.engine.submitted[0][1:]
    assert sampling.pooling == Pooling((YES, NO))
    assert answer["results"][0]["relevance_score"] == pytest.approx(
        1 / (1 + np.exp(2 - len(it.engine.submitted[1][1]) / 100)), abs=1e-6
    )
    text = Tokenizer.load(words).decode(prompt)
    assert text.endswith("<Query>: q\n<Document>: short\nassistant\n<think>\n\n</think>\n\n")
    assert "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n" in text
    assert it.post("/rerank", {"query": "q", "documents": documents, "return_documents": False}).json()["results"][
        0
    ] == {"index": 1, "relevance_score": answer["results"][0]["relevance_score"]}


def test_scores_pair_texts_and_spell_no_special_token(words: Path) -> None:
    it = pooling(words, PoolingModel(Task.SCORE))
    answer = it.post(SCORE, {"text_1": "q", "text_2": ["d", "<|im_end|>"]}).json()
    schemas.ScoreList.model_validate(answer, strict=False)
    assert [item["index"] for item in answer["data"]] == [0, 1]
    plain, spelled = [prompt for _, prompt, _ in it.engine.submitted]
    end = Tokenizer.load(words).encode("<|im_end|>", add_special_tokens=False)
    assert plain.count(end[0]) == spelled.count(end[0]) == 2
    assert len(it.post(SCORE, {"text_1": ["q", "r"], "text_2": ["d", "e"]}).json()["data"]) == 2
    refused = it.post(SCORE, {"text_1": ["q", "r"], "text_2": ["d", "e", "f"]}).json()["error"]
    assert (refused["param"], refused["message"]) == (
        "text_1",
        "text_1 must have 1 text or as many as text_2, 3, got 2.",
    )


@pytest.mark.parametrize("apart", [0.0, 1.0, 10.0, 30.0, 690.0, 709.0, 710.0, 1000.0, 3e38])
def test_logits_however_far_apart_are_probabilities(apart: float) -> None:
    for_yes, for_no = [probability_of(np.array(it, "<f4").tobytes()) for it in ([apart, 0], [0, apart])]
    assert for_yes == pytest.approx(1 / (1 + math.exp(-apart)))
    assert for_no == pytest.approx(math.exp(-apart) / (1 + math.exp(-apart)), rel=1e-6, abs=1e-300)
    assert 0 <= for_no <= for_yes <= 1


@pytest.mark.parametrize("path", ["/rerank", "/v2/rerank", "/score"])
def test_other_paths_of_vllm_answer_alike(words: Path, path: str) -> None:
    it = pooling(words, PoolingModel(Task.SCORE))
    body = {"text_1": "q", "text_2": "a"} if path == "/score" else {"query": "q", "documents": ["a"]}
    mine = SCORE if path == "/score" else RERANK
    ours, theirs = (it.post(each, body).json() for each in (mine, path))
    assert ours.keys() == theirs.keys()
    assert ours["usage"] == theirs["usage"]
    assert it.value("requests_total", route=path, outcome="ok") == 1


def test_a_route_of_another_task_is_refused_by_its_name(folder: Path, words: Path) -> None:
    servers = {
        "generate": served(folder),
        "embed": pooling(words, EMBED),
        "score": pooling(words, PoolingModel(Task.SCORE)),
    }
    tasks = {
        EMBEDDINGS: "embed",
        SCORE: "score",
        "/rerank": "score",
        "/score": "score",
        "/v1/chat/completions": "generate",
    }
    for own, it in servers.items():
        document = it.get("/openapi.json").json()["paths"]
        for path, task in tasks.items():
            assert (path in document) == (task == own)
            if task != own:
                refused = it.post(path, {})
                what = f"{path!r} needs a model for the task {task!r}, this one is served for {own!r} (--task)."
                assert (refused.status_code, refused.json()["error"]["message"]) == (404, what)
        assert it.post("/tokenize", {"prompt": "ab"}).status_code == 200
        assert it.get("/v1/models").json()["data"][0]["task"] == own


def test_a_model_of_another_prompt_is_not_scored(folder: Path, words: Path) -> None:
    with pytest.raises(ModelError, match="is no special token here"):
        RerankPrompt(Tokenizer.load(folder), None)
    with pytest.raises(ModelError, match="yes and no, of one token each"):
        RerankPrompt(Tokenizer.load(words), (1, 2))
