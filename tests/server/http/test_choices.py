"""Several answers to one prompt."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import pytest
from msgspec.structs import replace

from server.http.generation.pieces import Piece, merged
from server.protocol.messages import FinishReason, Fork, SamplingParams, Submit
from server.supervisor.choices import Choices
from support.api.edge_fakes import delta, events, playing, saying, served, usage_of

COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]


def test_a_chat_streams_its_choices_side_by_side(folder: Path) -> None:
    fields = {"messages": USER, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, _ = events(served(folder, saying("Hel", "lo")).post("/v1/chat/completions", fields))
    choices = [chunk["choices"][0] for chunk in chunks]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in own) == "Hello"
        assert own[-1]["finish_reason"] == "stop"
    assert last["usage"] == usage_of(len(b"[user]Hi[assistant]"), 18)


@pytest.mark.parametrize(
    ("seed", "seeds"), [(7, [7, 8, 9]), (None, [None] * 3), (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)])]
)
def test_each_choice_has_a_seed_of_its_own(folder: Path, seed: int | None, seeds: list[int | None]) -> None:
    it = served(folder)
    assert it.post(COMPLETIONS, {"prompt": "a", "n": 3, "seed": seed}).status_code == 200
    assert [sampling.seed for _, _, sampling in it.engine.submitted] == seeds


def test_the_choices_of_a_prompt_are_submitted_at_once(folder: Path) -> None:
    it = served(folder)
    assert it.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "seed": 5}).status_code == 200
    first, also_first, second, also_second = it.engine.choices
    assert first is also_first is not None
    assert second is also_second is not first
    assert it.post(COMPLETIONS, {"prompt": ["a", "a"]}).status_code == 200
    assert it.engine.choices[4:] == [None, None]


def test_the_last_choice_that_joins_submits_them_all() -> None:
    choices = Choices(3)
    submits = [Submit(name, [1, 2], SamplingParams(max_tokens=1, seed=ord(name))) for name in "abc"]
    assert [choices.join(submit) for submit in submits[:2]] == [None, None]
    whole = choices.join(submits[2])
    assert whole == replace(submits[0], forks=[Fork("b", ord("b")), Fork("c", ord("c"))])


def test_a_choice_that_fails_fails_the_whole_request(folder: Path) -> None:
    it = served(folder, playing(delta("a"), delta("", FinishReason.ERROR)))
    assert it.post(COMPLETIONS, {"prompt": "a", "n": 3}).status_code == 500
    assert len(it.engine.submitted) == 3
    assert it.services.admission.num_requests == 0


def test_unread_choices_wait_where_they_are_merged() -> None:
    num_taken = 0

    async def endless(index: int) -> AsyncGenerator[Piece]:
        nonlocal num_taken
        while True:
            await asyncio.sleep(0)
            num_taken += 1
            yield Piece(index, "x", None)

    async def run() -> None:
        async with aclosing(merged([endless(0), endless(1)])) as stream:
            for num_read in range(1, 20):
                await anext(stream)
                for _ in range(20):
                    await asyncio.sleep(0)
                assert num_taken <= num_read + 4  # two that wait, and one in the hands of each stream

    asyncio.run(run())
    assert num_taken >= 20
