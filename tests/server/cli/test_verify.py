"""`hallmark verify` on receipts and keys that cannot be used: one line and exit code 3."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from msgspec import structs

from qualification.common.exit_code import ExitCode
from qualification.receipt.keys import public_key_of
from server.cli.main import main
from server.settings import DEMO_MODEL
from support.receipts import CONTENT, PRIVATE, written

NOWHERE = "http://127.0.0.1:9"  # discard: nothing listens there


def line_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the one line of a run that ends with exit code 3."""
    assert main(["verify", *argv]) == ExitCode.ENVIRONMENT
    printed = capsys.readouterr()
    assert printed.err == ""
    [line] = printed.out.splitlines()
    return line


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"x" * (10 * 2**20), "more than 8388608 bytes"),
        (b"x" * (20 * 2**20), "cannot be read: more than 16777216 bytes"),
        (b'{"content":' * 100_000, "nested too deeply"),
        (b'{"a": 1}', "it is no receipt"),
        (written({"version": 3}), "version 3, this program reads versions 1 and 2"),
    ],
)
def test_a_bad_receipt_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: bytes, why: str) -> None:
    file = tmp_path / "receipt.json"
    file.write_bytes(data)
    line = line_of(capsys, str(file), "--url", NOWHERE)
    assert line.startswith(f"receipt: FAIL: {file}: ")
    assert why in line


def test_a_missing_receipt_and_server_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be read" in line_of(capsys, str(tmp_path / "none.json"), "--url", NOWHERE)
    file = tmp_path / "receipt.json"
    file.write_bytes(written(CONTENT))
    assert line_of(capsys, str(file), "--url", NOWHERE).startswith("environment: FAIL: http://127.0.0.1:9/version: ")
    assert "environment: FAIL" in line_of(capsys, str(file), "--url", "no url")


def test_a_key_that_cannot_be_used_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receipt, key = tmp_path / "receipt.json", tmp_path / "key"
    receipt.write_bytes(written(CONTENT))
    private = Ed25519PrivateKey.generate()
    for data, why in (
        (b"AAAA", "a public key has 32 bytes, this one has 3"),
        (b"\xff~", "this is neither"),
        (private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), "holds a private key"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "holds no public key"),
        (public_key_of(private).text.encode(), "give --key FILE"),  # another one than signed it
    ):
        key.write_bytes(data)
        assert why in line_of(capsys, str(receipt), "--url", NOWHERE, "--key", str(key))


def test_a_key_is_taken_in_pem_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receipt, key = tmp_path / "receipt.json", tmp_path / "key.pem"
    receipt.write_bytes(written(CONTENT))
    key.write_bytes(PRIVATE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert main(["verify", str(receipt), "--url", NOWHERE, "--key", str(key)]) == ExitCode.ENVIRONMENT
    signature, server = capsys.readouterr().out.splitlines()
    assert signature.startswith(f"signature: PASS: key {public_key_of(PRIVATE).key_id} signed it")
    assert server.startswith("environment: FAIL: http://127.0.0.1:9/v1/completions: ")


def test_a_setting_that_is_not_known_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    receipt = tmp_path / "receipt.json"
    receipt.write_bytes(written(structs.replace(CONTENT, settings={"dtype": "float32", "port\n": 80})))
    line = line_of(capsys, str(receipt), "--model", str(tmp_path))
    assert line.startswith("environment: FAIL: the receipt's setting port is none that decides numbers here: use")


@pytest.mark.starts
def test_a_setting_that_cannot_be_had_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    receipt = tmp_path / "receipt.json"
    receipt.write_bytes(written(structs.replace(CONTENT, settings={"tensor_parallel_size": 3})))
    assert main(["verify", str(receipt), "--model", str(DEMO_MODEL)]) == ExitCode.ENVIRONMENT
    assert "--tensor-parallel-size" in capfd.readouterr().err  # of the server
