"""Receipts as files: what is read, and what is refused in one line."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from qualification.receipt.content import canonical
from qualification.receipt.keys import PublicKey, public_key_of
from qualification.receipt.signed import (
    MAX_BYTES,
    Receipt,
    ReceiptError,
    check_consistent,
    check_signature,
    parse_receipt,
    sealed,
)
from support.receipts import CONTENT, PRIVATE, written

OTHER = Ed25519PrivateKey.generate()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet="abc_~", max_size=3), inner, max_size=4)
    ),
)


def checked(data: bytes, *keys: PublicKey) -> Receipt:
    receipt = parse_receipt(data)
    check_signature(receipt, keys or (public_key_of(PRIVATE),))
    check_consistent(receipt.content)
    return receipt


def refusal(data: bytes, *keys: PublicKey) -> str:
    with pytest.raises(ReceiptError) as caught:
        checked(data, *keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def changed(change: Callable[[Any], object]) -> bytes:
    """A receipt that says something else, and is signed."""
    content = json.loads(canonical(CONTENT))
    change(content)
    return written(content)


@given(JSON)
def test_canonical_json_is_what_pythons_own_writes(value: object) -> None:
    own = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert canonical(value) == own.encode()


def test_a_receipt_is_read_alone_and_within_its_answer() -> None:
    key = public_key_of(PRIVATE)
    alone = written(CONTENT)
    spaced = json.dumps({"id": "cmpl-1", "receipt": json.loads(alone)}, indent=2).encode()
    for data in (alone, spaced):
        assert checked(data, key).content == CONTENT


def test_no_byte_of_what_is_signed_may_change() -> None:
    data = written(CONTENT)
    content = canonical(CONTENT)
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1
        try:
            receipt = parse_receipt(bytes(altered))
            check_signature(receipt, [public_key_of(PRIVATE)])
        except ReceiptError:
            continue
        assert receipt.signed == content  # the key's id or the padding of base64, which say nothing of the content


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"x" * (10 * 2**20), f"more than {MAX_BYTES} bytes"),
        (b'{"content":' * 100_000, "nested too deeply"),
        (b'{"content":{"version":1,"x":' + b"[" * 500_000 + b"]" * 500_000 + b"}}", "nested too deeply"),
        (b"\xff\xfe", "not JSON"),
        (b"", "not JSON"),
        (b"[]", "it is no receipt"),
        (b'{"receipt": 3}', "it is no receipt"),
        (changed(lambda it: it.update(version=3)), "it has version 3, this program reads versions 1 and 2"),
        (changed(lambda it: it.pop("version")), "it has no version"),
        (changed(lambda it: it.update(surprise=1)), "unknown field `surprise`"),
        (changed(lambda it: it.pop("prompts")), "missing required field `prompts`"),
        (changed(lambda it: it.update(created="now")), "Expected `int`"),
        (changed(lambda it: it["answers"][0]["token_ids"].append(7)), "answers[0] has other token ids"),
        (changed(lambda it: it["prompts"][0]["token_ids"].insert(0, -1)), "prompts[0] has a token id that is none"),
        (changed(lambda it: it["answers"][0].update(prompt=3)), "names none of the prompts"),
        (changed(lambda it: it["answers"][0].update(logprobs="AAAA")), "has 3 bytes, not 4 for each token"),
        (changed(lambda it: it["answers"][0]["sampling"]["bindings"]["stop"].append("x")), "other bindings than"),
        (written(CONTENT).replace(b'"key_id"', b'"name"'), "malformed"),
        (written(CONTENT, signature=b"short"), "5 bytes, those of Ed25519 have 64"),
        (sealed(canonical(CONTENT), "ab", b"").replace(b'"signature":""', b'"signature":"~~"'), "not base64"),
        (written(CONTENT).replace(b'"demo"', b'"demo2"'), "it was changed since key"),
    ],
)  # fmt: skip
def test_a_bad_receipt_is_refused_in_one_line(data: bytes, why: str) -> None:
    assert why in refusal(data)


def test_the_program_of_the_docs_checks_a_signature(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "receipt.md").read_text()
    program = page.partition("```python\n")[2].partition("```")[0]
    assert len(program.strip().splitlines()) <= 15
    key = public_key_of(PRIVATE)
    keys = [{"key_id": key.key_id, "public_key": key.text}]
    (tmp_path / "version.json").write_text(json.dumps({"receipt_keys": keys}))
    right, wrong = json.loads(written(CONTENT)), json.loads(written(CONTENT).replace(b'"demo"', b'"demo2"'))
    for receipt, code in ((right, 0), (wrong, 1)):
        (tmp_path / "answer.json").write_text(json.dumps({"receipt": receipt}))
        command = [sys.executable, "-c", program, "answer.json", "version.json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert ("InvalidSignature" in done.stderr) == bool(code)


def test_a_receipt_of_an_unknown_key_names_the_keys() -> None:
    ours, theirs = public_key_of(PRIVATE), public_key_of(OTHER)
    line = refusal(written(CONTENT), theirs)
    assert f"key {ours.key_id} signed it, the keys at hand are {theirs.key_id}: give --key FILE" in line
