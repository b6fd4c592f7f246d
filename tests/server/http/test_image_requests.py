"""Images in requests: what the engine gets of them, in each API, and what is refused."""

import asyncio
import base64
import re
import struct
import zlib
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from openai.types.responses import ResponseFunctionToolCallOutputItem, ResponseInputMessageItem, ResponseItemList
from PIL import Image

from server.errors import SettingsError
from server.http.images.fetch import MediaFetcher, is_public
from server.http.responses.schemas import InputItemList
from support.api.edge_fakes import Served, served
from support.api.running_api import Running
from support.images.hostile import drawn
from support.images.served_images import (
    PAD,
    START,
    STOP,
    data_url,
    file_of,
    part,
    picture,
    served_images,
    write_gemma,
    write_gemma_4,
    write_internvl,
    write_model,
    write_pixtral,
)

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
WIDE, TALL = picture(112, 56), picture(56, 140)  # 4 x 4 and 3 x 7 tokens: 16 at least
TEXT = {"type": "text", "text": "see "}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sees"))


@pytest.fixture
def it(folder: Path) -> Served:
    return served_images(folder)


def ask(it: Served, content: Sequence[Any], **fields: Any) -> httpx2.Response:
    return it.post(CHAT, {"messages": [{"role": "user", "content": [*content]}], "max_tokens": 4, **fields})


def seen(it: Served) -> tuple[list[int], list[tuple[int, int, tuple[int, int, int]]]]:
    """Return the ids that the engine got, and of each image its place, tokens and grid."""
    return it.engine.submitted[-1][1], [(im.start, im.num_tokens, im.grid) for im in it.engine.images[-1]]


def test_images_stand_where_the_conversation_has_them(it: Served) -> None:
    answer = ask(it, [TEXT, part(WIDE), {"type": "text", "text": "and "}, {"type": "text", "text": "see"}, part(TALL)])
    assert answer.status_code == 200, answer.text
    ids, images = seen(it)
    assert images == [(11, 18, (1, 6, 12)), (38, 21, (1, 14, 6))]
    before, between = [*b"[user]see ", START], [STOP, *b"and see", START]
    assert ids == [*before, *[PAD] * 18, *between, *[PAD] * 21, STOP, *b"[assistant]"]
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    assert [len(im.pixels) for im in it.engine.images[-1]] == [3 * 196 * 6 * 12, 3 * 196 * 14 * 6]


def test_gemmas_images_have_borders_and_lines_around_them(tmp_path: Path) -> None:
    it = served_images(write_gemma(tmp_path))
    spelled = {"type": "text", "text": "<|vision_start|>see"}
    assert ask(it, [spelled, part(WIDE)]).status_code == 200
    before, behind = [*b"[user]<|vision_start|>see\n\n", START], [STOP, *b"\n\n[assistant]"]
    assert seen(it) == ([*before, *[PAD] * 16, *behind], [(len(before), 16, (1, 16, 16))])


def test_gemma_4s_images_have_borders_and_fill_a_budget(tmp_path: Path) -> None:
    it = served_images(write_gemma_4(tmp_path))
    assert ask(it, [{"type": "text", "text": "<|image_pad|>"}, part(WIDE)]).status_code == 200
    before = [*b"[user]<|image_pad|>", START]
    assert seen(it) == ([*before, *[PAD] * 55, STOP, *b"[assistant]"], [(len(before), 55, (1, 15, 33))])


def test_pixtrals_images_stand_in_lines(tmp_path: Path) -> None:
    it = served_images(write_pixtral(tmp_path))
    spelled = {"type": "text", "text": "[IMG][IMG_BREAK]"}
    assert ask(it, [spelled, part(WIDE), part(TALL)], mm_processor_kwargs={"max_pixels": 112 * 112}).status_code == 200
    before, line = b"[user][IMG][IMG_BREAK]", [PAD, PAD, START]
    wide, tall = [*[PAD] * 4, START, *[PAD] * 4], [*line, *line, *line, PAD, PAD]
    ids, images = seen(it)
    assert ids == [*before, *wide, STOP, *tall, STOP, *b"[assistant]"]
    assert images == [(len(before), 9, (1, 4, 8)), (len(before) + 10, 11, (1, 8, 4))]
    counted = it.post("/tokenize", {"messages": [{"role": "user", "content": [part(WIDE)]}]}).json()
    assert counted["count"] == 6 + 10 + 11
    refused = ask(it, [part(WIDE)], mm_processor_kwargs={"min_pixels": 5})
    assert (refused.status_code, "makes no image larger" in refused.text) == (400, True)


def test_internvls_images_are_tiles_between_borders(tmp_path: Path) -> None:
    it = served_images(write_internvl(tmp_path))
    spelled = {"type": "text", "text": "<img>"}
    assert ask(it, [spelled, part(WIDE)]).status_code == 200  # of 2 x 1: two tiles, and the whole
    before = [*b"[user]<img>", START]
    assert seen(it) == ([*before, *[PAD] * 12, STOP, *b"[assistant]"], [(len(before), 12, (1, 12, 4))])
    assert ask(it, [part(WIDE)], mm_processor_kwargs={"max_pixels": 56 * 56}).status_code == 200
    assert seen(it)[1] == [(7, 4, (1, 4, 4))]
    refused = ask(it, [part(WIDE)], mm_processor_kwargs={"min_pixels": 5})
    assert (refused.status_code, "chooses tiles of 56 x 56" in refused.text) == (400, True)


def test_official_clients_send_images(it: Served) -> None:
    with Running(it) as running:
        options: dict[str, Any] = {"api_key": "none", "max_retries": 0}
        with openai.OpenAI(base_url=f"{running.url}/v1", **options) as client:
            content: Any = [TEXT, part(WIDE)]
            said = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": content}], max_tokens=4
            )
        with anthropic.Anthropic(base_url=running.url, **options) as other:
            source: Any = {"type": "base64", "media_type": "image/png", "data": WIDE.partition(",")[2]}
            block: Any = {"type": "image", "source": source}
            message = other.messages.create(
                model="tiny", messages=[{"role": "user", "content": [TEXT, block]}], max_tokens=4
            )
    assert said.usage is not None
    assert said.usage.prompt_tokens == message.usage.input_tokens == len(it.engine.submitted[-1][1])
    assert [len(images) for images in it.engine.images] == [1, 1]


def test_images_of_a_stored_input_are_listed(it: Served) -> None:
    given = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": WIDE}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": given}
    first = it.post(RESPONSES, {"input": [{"role": "user", "content": given}, call, result]}).json()
    listed = it.get(f"{RESPONSES}/{first['id']}/input_items?order=asc").json()
    InputItemList.model_validate(listed)
    message, _, output = ResponseItemList.model_validate(listed).data
    assert isinstance(message, ResponseInputMessageItem)
    assert isinstance(output, ResponseFunctionToolCallOutputItem)
    assert [each.to_dict() for each in message.content] == listed["data"][2]["output"]
    assert listed["data"][0]["content"] == [given[0], given[1] | {"detail": "auto"}]


def test_each_api_makes_the_same_prompt(it: Served) -> None:
    ask(it, [TEXT, part(WIDE)])
    wanted = seen(it)
    data = WIDE.partition(",")[2]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    turn = {"role": "user", "content": [TEXT, block]}
    it.post(MESSAGES, {"messages": [turn], "max_tokens": 4})
    assert seen(it) == wanted
    given = [{"type": "input_text", "text": "see "}, {"type": "input_image", "image_url": WIDE, "detail": "auto"}]
    first = it.post(RESPONSES, {"input": [{"role": "user", "content": given}]}).json()
    assert seen(it) == wanted
    it.post(RESPONSES, {"input": "More", "previous_response_id": first["id"]})
    assert seen(it)[1] == wanted[1]
    counted = it.post("/v1/messages/count_tokens", {"messages": [turn]}).json()
    tokens = it.post("/tokenize", {"messages": [{"role": "user", "content": [TEXT, part(WIDE)]}]}).json()
    assert (counted["input_tokens"], tokens["tokens"]) == (len(wanted[0]), wanted[0])


def test_a_tool_may_answer_with_an_image(it: Served) -> None:
    block = {"type": "image", "source": {"type": "url", "url": WIDE}}
    turns = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [block]}]},
    ]
    assert it.post(MESSAGES, {"messages": turns, "max_tokens": 4}).status_code == 200
    assert [tokens for _, tokens, _ in seen(it)[1]] == [18]


def test_answers_to_one_prompt_send_its_images_once(it: Served) -> None:
    assert ask(it, [part(WIDE)], n=2).status_code == 200
    assert sorted(map(len, it.engine.images)) == [0, 1]


@pytest.mark.parametrize(
    ("fields", "detail", "tokens"),
    [
        ({}, None, 225),
        ({"mm_processor_kwargs": {"max_pixels": 40_000}}, None, 49),
        ({"mm_processor_kwargs": {"min_pixels": 1, "max_pixels": 784}}, None, 1),
        ({}, "low", 225),
        ({"mm_processor_kwargs": {"max_pixels": 40_000}}, "low", 49),
    ],
)
def test_a_request_bounds_the_pixels(it: Served, fields: dict[str, Any], detail: str | None, tokens: int) -> None:
    assert ask(it, [part(picture(600, 600), detail=detail)], **fields).status_code == 200
    assert seen(it)[1][0][1] == tokens


def test_what_a_user_spells_is_no_image(it: Served) -> None:
    spelled = {"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|>"}
    assert ask(it, [spelled, part(WIDE)]).status_code == 200
    ids, images = seen(it)
    assert (len(images), ids.count(PAD), ids.count(START)) == (1, 18, 1)


def of_header(side: int) -> str:
    """A PNG file whose header says that it has so many pixels a side."""
    file = bytearray(file_of(Image.new("RGB", (1, 1))))
    file[16:24] = struct.pack(">2I", side, side)
    file[29:33] = struct.pack(">I", zlib.crc32(file[12:29]))
    return data_url(bytes(file))


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no image": (part(data_url(b"no image at all")), {}, "the 15 bytes are no image of PNG, JPEG, WebP or GIF"),
    "truncated": (part(data_url(file_of(Image.effect_noise((64, 64), 9))[:900])), {}, "cannot be decoded"),
    "no base64": (part("data:image/png;base64,a*b="), {}, "the image is not base64"),
    "no URL": (part("/etc/passwd"), {}, "the URL of an image must begin with data:image"),
    "a host": (part("http://localhost/a.png"), {}, "this server fetches no images; send the image as a data: URL"),
    "thin": (part(picture(1, 300)), {}, "at most 200 times as long as the other, the image has 1 x 300"),
    "pixels": (part(picture(600, 600)), {}, "PNG image has 600 x 600 = 360000 pixels, the limit is 300000"),
    "many pixels": (part(of_header(30_000)), {}, "the image has 900000000 pixels, the limit is 300000"),
    "bounds": (part(WIDE), {"mm_processor_kwargs": {"max_pixels": 10**9}}, "max_pixels must be from 784 to the"),
    "cut": (part(WIDE), {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens is not implemented for prompts with"),
    "receipt": (part(WIDE), {"receipt": True}, "receipt is not implemented for prompts with images"),
    "audio": ({"type": "input_audio", "input_audio": {}}, {}, "the type 'input_audio' is not implemented"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_image_is_refused_by_name(folder: Path, case: str) -> None:
    it = served_images(folder, max_image_pixels=300_000)
    content, fields, said = REFUSED[case]
    answer = ask(it, [TEXT, content], **fields)
    assert (answer.status_code, it.engine.submitted) == (400, [])
    assert said in answer.json()["error"]["message"]


def test_images_are_counted_and_fit_in_the_context(folder: Path) -> None:
    it = served_images(folder, limit_images=5)
    for num, said in ((6, "6 images, the limit is 5 (--limit-images)"), (5, "1125 tokens, this server computes")):
        answer = ask(it, [part(picture(600, 600))] * num)
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True)


def test_waiting_images_are_bounded(folder: Path) -> None:
    it = served_images(folder, max_queued_bytes=100_000)
    place = it.services.admission.enter()
    place.add_image_bytes(90_000)
    answer = ask(it, [part(WIDE)])
    assert (answer.status_code, "bytes of images would wait" in answer.text) == (429, True)
    place.leave()
    assert ask(it, [part(WIDE)]).status_code == 200
    assert it.services.admission.num_image_bytes == 0


def test_a_model_without_a_tower_refuses_images(folder: Path) -> None:
    answer = ask(served(folder), [part(WIDE)])
    assert answer.status_code == 400
    assert "messages[0].content[0]: the type 'image_url' is not implemented" in answer.json()["error"]["message"]


def test_a_template_without_images_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    answer = ask(served_images(tmp_path), [part(WIDE)])
    assert "wrote 0 image tokens for 1 images" in answer.json()["error"]["message"]


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_hostile_images_are_served_or_refused_by_name(it: Served) -> None:
    """The whole is trials/hostile_images.py."""
    draw = Random(0)

    async def ask_all() -> None:
        async with it.client() as client:
            for _ in range(60):
                kind, file = drawn(draw)
                message = {"role": "user", "content": [part(data_url(file))]}
                answer = await client.post("/tokenize", json={"messages": [message]})
                refused = answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].content[0]"
                assert answer.status_code == 200 or refused, (kind, answer.text)

    asyncio.run(ask_all())


class Hosts:
    """Hosts of images: which addresses they have, and what they answer by URL."""

    def __init__(self, answers: dict[str, httpx2.Response], addresses: Sequence[str] = ("93.184.216.34",)) -> None:
        self.asked: list[str] = []
        self._answers = answers
        self._addresses = addresses

    def fetcher(self, *, is_sure: bool = True) -> MediaFetcher:
        transport = httpx2.MockTransport(self._answer)
        allowed = is_public if is_sure else lambda _: True
        return MediaFetcher(frozenset({"a.example"}), 10_000, 0.5, self._resolve, allowed, transport)

    async def _resolve(self, host: str, port: int) -> Sequence[str]:  # noqa: ARG002
        return self._addresses

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(f"{request.url.host} {request.headers['host']}{request.url.path}")
        return self._answers[request.url.path]


ALLOWED, PUBLIC = "http://a.example/", "93.184.216.34"
IMAGE = httpx2.Response(200, content=base64.b64decode(WIDE.partition(",")[2]))


def test_an_allowed_host_is_asked_at_the_address_that_was_checked(folder: Path) -> None:
    hosts = Hosts({"/a": httpx2.Response(302, headers={"location": "/b"}), "/b": IMAGE})
    it = served_images(folder, fetcher=hosts.fetcher())
    assert ask(it, [part("https://A.example/a")]).status_code == 200
    assert hosts.asked == ["93.184.216.34 a.example/a", "93.184.216.34 a.example/b"]
    assert [tokens for _, tokens, _ in seen(it)[1]] == [18]


@pytest.mark.parametrize("name", ["http://a.example/", "a.example:8443", "*.example", "a b", "[2606::1]"])
def test_a_name_that_no_url_can_have_is_no_allowed_host(name: str) -> None:
    assert MediaFetcher.of("A.example, 2606::1,ä.example", 1).hosts == {"a.example", "2606::1", "ä.example"}
    with pytest.raises(SettingsError, match=f"--allowed-media-hosts: '{re.escape(name)}' is no host name"):
        MediaFetcher.of(f"a.example,{name}", 1)


@pytest.mark.parametrize(
    ("url", "answer", "addresses", "said"),
    [
        ("http://b.example/", IMAGE, (PUBLIC,), "its host is not one of --allowed-media-hosts"),
        ("http://user@a.example/", IMAGE, (PUBLIC,), "without a user's name"),
        (ALLOWED, IMAGE, (PUBLIC, "10.0.0.1"), "an address that is not public"),
        (ALLOWED, IMAGE, ("169.254.169.254",), "an address that is not public"),
        (ALLOWED, httpx2.Response(404), (PUBLIC,), "answers with status 404"),
        (ALLOWED, httpx2.Response(200, content=b"a" * 10_001), (PUBLIC,), "more than 10000 bytes"),
        (ALLOWED, httpx2.Response(302, headers={"location": "http://localhost/"}), (PUBLIC,), "its host is not one of"),
        (ALLOWED, httpx2.Response(302, headers={"location": "/"}), (PUBLIC,), "more than 3 redirects"),
    ],
)
def test_a_url_that_leads_elsewhere_is_refused(
    folder: Path, url: str, answer: httpx2.Response, addresses: Sequence[str], said: str
) -> None:
    it = served_images(folder, fetcher=Hosts({"/": answer}, addresses).fetcher())
    found = ask(it, [part(url)])
    assert (found.status_code, it.engine.submitted) == (400, [])
    assert said in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("form", "is_refused_with_public"),
    [
        ("::ffff:{}", False),  # as a socket of IPv6 has an address of IPv4
        ("64:ff9b::{}", False),  # NAT64 of the whole Internet
        ("64:ff9b:1::{}", True),  # NAT64 of one network
        ("::ffff:0:{}", True),  # SIIT
        ("::{}", True),
        ("2002:{:x}::1", False),  # 6to4
        ("2001:0:5db8:d822::{:x}", True),  # Teredo: bits of the client's address are inverted
        ("fec0::{}", True),  # of a site
    ],
)
def test_an_address_within_another_must_be_public_too(form: str, is_refused_with_public: bool) -> None:
    def embedded(text: str) -> str:
        number = int(IPv4Address(text)) ^ (0xFFFFFFFF if form.startswith("2001:0") else 0)
        return str(IPv6Address(form.format(text) if "{}" in form else form.format(number).replace(
            f"{number:x}", f"{number >> 16:x}:{number & 0xFFFF:x}")))  # fmt: skip

    inside = ("10.0.0.1", "127.0.0.1", "169.254.169.254", "192.168.7.9", "100.64.0.1", "224.0.0.1")
    assert [it for it in inside if is_public(embedded(it))] == []
    assert is_public(embedded(PUBLIC)) is not is_refused_with_public
    assert is_public("2606:4700::6810:85e5")
