"""The key that signs receipts: made once, read from a file, rotated, and refused where others may read it."""

import logging
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from server.errors import SettingsError
from server.receipt.keyring import OWN_FILE, KeyRing
from server.settings import Settings

PEM = (Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def write_key(file: Path, mode: int = 0o600) -> Path:
    file.write_bytes(Ed25519PrivateKey.generate().private_bytes(*PEM))
    file.chmod(mode)
    return file


def loaded(folder: Path, file: Path | None = None) -> KeyRing:
    return KeyRing.load(Settings(cache_dir=str(folder), receipt_key_file=None if file is None else str(file)))


def test_the_first_start_makes_a_key_and_the_next_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    first, second = loaded(folder), loaded(folder)
    assert first.public_keys == second.public_keys
    assert stat.S_IMODE((folder / OWN_FILE).stat().st_mode) == 0o600
    assert os.listdir(folder) == [OWN_FILE]
    assert second.public_keys[0].has_signed(b"data", first.sign(b"data"))
    assert not second.public_keys[0].has_signed(b"Data", first.sign(b"data"))


def test_a_folder_that_takes_no_file_costs_the_next_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    keys = [loaded(tmp_path / "file" / "below").key_id for _ in range(2)]
    assert keys[0] != keys[1]
    assert "the key of receipts cannot be kept" in caplog.text


def test_a_rotated_key_stays_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ring = loaded(tmp_path)
    before = ring.public_keys[0]
    signature = ring.sign(b"data")
    assert ring.rotate()
    assert ring.public_keys == (ring.public_keys[0], before)
    assert ring.public_keys[0].has_signed(b"data", ring.sign(b"data"))
    assert before.has_signed(b"data", signature)
    assert loaded(tmp_path).public_keys == ring.public_keys[:1]
    assert f"signed by key {ring.key_id}; {before.key_id} stays listed" in caplog.text
    assert stat.S_IMODE((tmp_path / OWN_FILE).stat().st_mode) == 0o600


def test_servers_of_one_folder_rotate_to_one_key(tmp_path: Path) -> None:
    first, second = loaded(tmp_path), loaded(tmp_path)
    assert first.rotate()
    assert second.rotate()
    assert first.public_keys == second.public_keys


def test_an_operators_file_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_key(tmp_path / "key.pem")
    ring = loaded(tmp_path, file)
    before = ring.key_id
    assert not ring.rotate()  # the same key
    write_key(file)
    assert ring.rotate()
    assert [key.key_id for key in ring.public_keys] == [ring.key_id, before]
    file.unlink()
    assert not ring.rotate()
    assert "SIGHUP: receipts are signed by the key of before" in caplog.text
    assert not (tmp_path / OWN_FILE).exists()


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o640 | 0o010, 0o777])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SettingsError, match=rf"key.pem has mode {mode:04o}, .*expected 0600"):
        loaded(tmp_path, write_key(tmp_path / "key.pem", mode))


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440])
def test_a_mounted_secret_is_taken(tmp_path: Path, mode: int) -> None:
    assert loaded(tmp_path, write_key(tmp_path / "key.pem", mode)).public_keys


def test_a_file_that_holds_no_key_of_ours_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    for content in (b"", b"\x00" * 100, b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"):
        file.write_bytes(content)
        file.chmod(0o600)
        with pytest.raises(SettingsError, match="holds no private key in PEM"):
            loaded(tmp_path, file)
    file.write_bytes(generate_private_key(SECP256R1()).private_bytes(*PEM))
    with pytest.raises(SettingsError, match="another algorithm than Ed25519"):
        loaded(tmp_path, file)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(SettingsError, match=r"--receipt-key-file .* cannot be read"):
            loaded(tmp_path, path)
