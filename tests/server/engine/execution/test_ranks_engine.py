"""Engines of four processes that replay graphs and run ahead give the tokens of one; of two, e2e has a server."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.models.draft_heads import add_draft_head
from support.models.tiny_families import RECURRENT, save_reference
from support.ranks.forks import STUB, Forks
from support.ranks.ranks_engine import drive, drive_hybrid


def found_by(forks: Forks, program: str, world: int, folder: Path, *arguments: str, follower: str) -> dict[str, Any]:
    out, rooms = folder / "found.json", "support.ranks"
    assert forks.run(f"{rooms}.{program}", str(world), str(out), *arguments, follower=f"{rooms}.{follower}") == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.first
def test_ranks_with_graphs_that_run_ahead_answer_as_one_does(forks: Forks, tmp_path: Path) -> None:
    alone = json.loads(json.dumps(drive(1)))
    found = found_by(forks, "ranks_engine", 4, tmp_path, follower="ranks_follower")
    layers = found.pop("layers")
    assert layers["first"] is None
    assert 0.01 < layers["largest"] <= 1
    assert (alone.pop("checked ranks"), found.pop("checked ranks")) == ([0], [0, 1, 2, 3])
    assert found.pop("numbers") == pytest.approx(alone.pop("numbers"), abs=1e-3)
    assert found == alone
    assert found["replays"] > 5
    assert found["batched"]["r2"] == found["alone"]["r2"]
    assert found["embedded"] == found["batched"]
    assert found["check"] == ["match"]
    assert found["drafted"] == found["mixed"]
    assert found["drafted replays"] > 3


def test_a_rank_that_computes_another_layer_is_seen(forks: Forks, tmp_path: Path) -> None:
    found = found_by(forks, "ranks_engine", 2, tmp_path, STUB, follower="shifted_rank")
    assert found["first"].startswith("layer 0, queries of rank 1, in ")


def test_two_ranks_of_a_hybrid_answer_as_one(forks: Forks, tmp_path: Path) -> None:
    model = tmp_path / "model"
    sizes = {"linear_num_value_heads": 16, "max_position_embeddings": 256}
    save_reference(model, "qwen3_5_text", {**RECURRENT, **sizes})
    found = found_by(forks, "ranks_engine", 2, tmp_path, str(model), follower="ranks_follower")
    assert found == drive_hybrid(1, str(model))
    answers = found["answers"]
    assert all(answers[f"alone {i}"] == answers[f"beside {i}"] == answers[f"fork {i}"] for i in range(5))
    assert found["hits"] > 0
    assert found["replays"] > 10


def test_two_ranks_verify_what_their_head_drafts(forks: Forks, tmp_path: Path) -> None:
    model = tmp_path / "model"
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 256, "eos_token_id": None}
    save_reference(model, "qwen3_5_text", {**RECURRENT, **sizes})
    add_draft_head(model, 2)
    found = found_by(forks, "head_ranks", 2, tmp_path, str(model), follower="head_ranks")
    assert found["drafted"] == found["plain"]
    assert found["accepted"] > 20
