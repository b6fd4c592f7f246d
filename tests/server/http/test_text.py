"""Models, tokenize and detokenize."""

from pathlib import Path

import pytest

from server.settings import Settings
from support.api.edge_fakes import MAX_MODEL_LEN, ScriptedEngine, Served, make_services, served, write_tokenizer


def test_a_model_answers_to_each_of_its_names(folder: Path) -> None:
    it = served(folder, served_model_name="org/name,claude-haiku-4-5,gpt-5")
    listed = it.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["org/name", "claude-haiku-4-5", "gpt-5"]
    assert [it.get(f"/v1/models/{card['id']}").json() for card in listed] == listed
    assert {card["max_model_len"] for card in listed} == {MAX_MODEL_LEN}
    assert it.get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    for card in listed:
        answer = it.post("/v1/completions", {"prompt": "a", "model": card["id"]})
        assert (answer.status_code, answer.json()["model"]) == (200, "org/name")  # the first, as vLLM
    assert it.value("time_to_first_token_seconds_count", model="org/name", bucket="le_128") == 3
    refused = it.post("/v1/completions", {"prompt": "a", "model": "gpt"}).json()["error"]
    assert refused["message"] == ("The model 'gpt' does not exist here, 'org/name', 'claude-haiku-4-5' and 'gpt-5' do.")


@pytest.mark.parametrize(
    ("model", "root"),
    [("/models/tiny", "/models/tiny"), ("/cache/hub/models--org--name/snapshots/0123abcd", "org/name")],
)
def test_a_model_is_listed_with_its_folder_or_hub_id(folder: Path, model: str, root: str) -> None:
    engine = ScriptedEngine()
    it = Served(make_services(folder, engine, Settings(model=model)), engine)
    assert it.get("/v1/models").json()["data"][0]["root"] == root  # benches of others find the tokenizer by it


def test_a_prompt_is_tokenized_and_back(folder: Path) -> None:
    it = served(folder)
    tokens = it.post("/tokenize", {"prompt": "héllo"}).json()
    assert tokens == {"count": 6, "max_model_len": MAX_MODEL_LEN, "tokens": list("héllo".encode())}
    assert it.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": "héllo"}


def test_a_model_without_a_chat_template_cannot_chat(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, has_template=False)
    engine = ScriptedEngine()
    it = Served(make_services(tmp_path, engine, Settings(model="tiny")), engine)
    answer = it.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_field")
