"""Prompts with images: small models whose towers and positions are those of transformers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from server.engine.scheduling.sequence import Sequence
from server.model.decoder import Decoder
from server.model.vision.tower import Image, Tower
from support.engine.image_session import PAGE_SIZE, PIXELS, ImageSession, Prompt, answer_of, load_with_tower, rows_of
from support.models.tiny_images import GEMMA, GEMMA_4_LARGE, IMAGE, KINDS, SIDE, image_of, prompt_of, save_tiny

# Kinds whose answers are long: positions of more than 64 generated tokens go on behind an image, in planes or in a row.
LONG = ("qwen2.5 vl", "mistral 3", GEMMA, GEMMA_4_LARGE)
LONG_ANSWERS, SHORT_ANSWERS = (20, 66, 8, 40), (12, 12, 8, 12)  # tokens; the last one goes on behind its preemption


@dataclass(frozen=True)
class Loaded:
    model: PreTrainedModel
    decoder: Decoder
    tower: Tower
    prompts: list[Prompt]
    due: list[list[int]]

    @property
    def side(self) -> int:
        return self.tower.config.patch_size

    @property
    def num_found_tokens(self) -> int:
        """Tokens of the prompts that are found again in pages, which for Gemma end within no image."""
        found = 0
        for ids, images in self.prompts:
            borders = range(PAGE_SIZE, len(ids), PAGE_SIZE)
            within = {place for it in images for place in range(it.start + 1, it.start + it.num_tokens)}
            cut = within if self.decoder.config.has_image_spans else set()
            found += max((it for it in borders if it not in cut), default=0)
        return found


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp("images")
    model = save_tiny(folder, request.param)
    decoder, tower = load_with_tower(folder)
    side, has_ends = tower.config.patch_size, tower.config.has_line_ends
    merge = tower.config.merge
    grids = ((6, 6),) * 3 if request.param == GEMMA else ((4, 6), (2, 14), (10, 6))
    if tower.config.is_tiled:  # images of one tile, of two and of three
        grids = ((SIDE, SIDE), (2 * SIDE, SIDE), (3 * SIDE, SIDE))
    if merge == 1:
        grids = ((2, 3), (1, 7), (5, 3))
    small, wide, tall = (
        image_of(seed, *grid, side, merge=merge, has_line_ends=has_ends) for seed, grid in enumerate(grids)
    )
    prompts = [
        prompt_of(5, 6, 7, small, 8, 9),
        prompt_of(3, small, 4, wide, tall, 12, 13),
        prompt_of(20, 21),
        prompt_of(tall, 11),
    ]
    lengths = LONG_ANSWERS if request.param in LONG else SHORT_ANSWERS
    due = [answer_of(model, it, side, length) for it, length in zip(prompts, lengths, strict=True)]
    return Loaded(model, decoder, tower, prompts, due)


def answers(session: ImageSession, loaded: Loaded) -> list[list[int]]:
    session.outputs.clear()
    for index, (prompt, due) in enumerate(zip(loaded.prompts, loaded.due, strict=True)):
        session.ask(f"r{index}", prompt, len(due))
    return session.drain().all_tokens(len(loaded.prompts))


def test_an_images_bits_do_not_depend_on_those_beside_it(loaded: Loaded) -> None:
    own = Tower(loaded.tower.config, loaded.tower.weights, PIXELS, is_reproducible=True)
    images = [Image.of(it.pixels, it.grid[1:], loaded.side) for _, images in loaded.prompts for it in images]
    together, alone = own.encode(images), [own.encode([image]) for image in images]
    assert torch.equal(together, torch.cat(alone))
    assert torch.allclose(together, loaded.tower.encode(images), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_tower_computes_what_transformers_does(loaded: Loaded) -> None:
    images = [image for _, images in loaded.prompts for image in images]
    given = [Image.of(it.pixels, it.grid[1:], loaded.side) for it in images]
    rows = rows_of(loaded.model, images, loaded.side)
    torch.testing.assert_close(loaded.tower.encode(given), rows, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("max_step", "max_written"), [(64, 20), (5, None)])
def test_answers_are_those_of_transformers(loaded: Loaded, max_step: int, max_written: int | None) -> None:
    if loaded.decoder.config.has_image_spans:  # an image beside a token of each of the other prompts
        max_step = max(max_step, 3 + max(it.num_tokens for _, images in loaded.prompts for it in images))
    session = ImageSession(loaded.decoder, loaded.tower, max_step=max_step, max_written=max_written)
    assert answers(session, loaded) == loaded.due
    times = session.worker.take_tower_times()
    assert sum(it.num_images for it in times) == 3  # each once, wherever it stands
    assert max_written is None or all(it.num_images == 1 or it.num_tokens <= max_written for it in times)
    assert answers(session, loaded) == loaded.due
    assert (session.num_computed_images(), session.total("num_prefix_hit_tokens")) == (0, loaded.num_found_tokens)


@pytest.mark.parametrize("loaded", LONG, indirect=True)
def test_a_preempted_prompt_keeps_its_images(loaded: Loaded) -> None:
    session = ImageSession(loaded.decoder, loaded.tower, max_step=32, num_pages=8, num_rows=30)
    assert answers(session, loaded) == loaded.due
    assert session.total("num_preemptions") > 0


class WithoutImages:
    """A tap by which positions count tokens alone, and an image's tokens see those before them alone."""

    def begin(self, seq: Sequence) -> None:
        seq.position_delta, seq.whole_spans = 0, ()

    def end(self, seq: Sequence, *, is_sound: bool) -> None: ...


def test_positions_and_masks_that_ignore_an_image_are_other_answers(loaded: Loaded) -> None:
    session = ImageSession(loaded.decoder, loaded.tower)
    session.engine.answers = WithoutImages()
    found = answers(session, loaded)
    config = loaded.decoder.config  # of Mistral 3 an image has as many positions as tokens, and they are causal
    is_same = not (config.has_three_positions or config.has_image_spans)
    assert [a == b for a, b in zip(found, loaded.due, strict=True)] == [is_same, is_same, True, is_same]


@pytest.mark.parametrize("loaded", ["qwen2.5 vl", "glm4v", "internvl", GEMMA, GEMMA_4_LARGE], indirect=True)
def test_pages_are_found_by_the_same_image_only(loaded: Loaded) -> None:
    ids, (image,) = prompt_of(*[7] * 14, image_of(1, 6, 6, loaded.side), *[8] * 20)
    session = ImageSession(loaded.decoder, loaded.tower)
    other = (ids, (msgspec.structs.replace(image_of(2, 6, 6, loaded.side), start=image.start),))

    def hits(prompt: Prompt, **more: object) -> tuple[int, int]:
        session.outputs.clear()
        session.ask("r", prompt, 2, **more)
        session.drain()
        return session.total("num_prefix_hit_tokens"), session.num_computed_images()

    same = (ids, (image,))
    assert [hits(it) for it in (same, other, same, other)] == [(0, 1), (0, 1), (32, 0), (32, 0)]
    assert hits(same, cache_salt=b"another key") == (0, 1)  # its time must not tell that someone else has the image


@pytest.mark.parametrize("loaded", [GEMMA], indirect=True)
@pytest.mark.parametrize("whole", ["", "model."])
def test_a_tower_is_read_by_the_published_names(loaded: Loaded, whole: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, GEMMA)  # as transformers writes it: vision_tower.encoder, ...
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [it for it in tensors if it.startswith(("vision_tower.", "multi_modal_projector."))]:
        tensors[whole + name.replace("vision_tower.", "vision_tower.vision_model.")] = tensors.pop(name)
    save_file(tensors, file)
    _, tower = load_with_tower(tmp_path)
    own, found = (it.weights.named(it.config) for it in (loaded.tower, tower))
    assert all(torch.equal(own[name], found[name]) for name in own)


@pytest.mark.parametrize("loaded", ["qwen2.5 vl"], indirect=True)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda it: {"grid": (1, it.grid[2], it.grid[1] + 2)}, "bytes"),
        (lambda it: {"num_tokens": it.num_tokens - 1}, "tokens of the prompt"),
        (lambda it: {"grid": (2, it.grid[1], it.grid[2]), "pixels": 2 * it.pixels}, "2 frames"),
        (lambda _: {"grid": (1, 3, 8)}, "multiple of 2"),
        (lambda _: {"start": 90}, "within the prompt"),
    ],
)
def test_images_that_do_not_fit_are_refused(loaded: Loaded, change: Callable[..., dict[str, object]], why: str) -> None:
    ids, (image,) = loaded.prompts[0]
    session = ImageSession(loaded.decoder, loaded.tower)
    session.ask("r", (ids, (msgspec.structs.replace(image, **change(image)),)), 2)
    (delta,) = [it for output in session.drain().outputs for it in output.deltas]
    assert (delta.error_code, why in (delta.error_message or "")) == ("invalid_value", True)


@pytest.mark.parametrize("loaded", ["qwen2.5 vl"], indirect=True)
def test_a_prompt_with_more_images_than_rows_is_refused(loaded: Loaded) -> None:
    session = ImageSession(loaded.decoder, loaded.tower, num_rows=27)
    assert loaded.prompts[1][0].count(IMAGE) == 28
    session.ask("r", loaded.prompts[1], 2)
    (delta,) = [it for output in session.drain().outputs for it in output.deltas]
    assert "the limit is 27" in (delta.error_message or "")
