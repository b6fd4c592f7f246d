"""The API over TLS: certificates of the server and of clients, renewed while it runs."""

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from server.edge.tls import Tls
from server.errors import SettingsError
from server.settings import Settings, read_settings
from support.api.edge_fakes import served
from support.api.running_api import Running

BODY = {"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": True}


@dataclass(frozen=True, slots=True)
class Pair:
    """PEM files of a certificate of 127.0.0.1, signed by itself, and of its key."""

    certificate: Path
    key: Path


def pair(folder: Path, name: str, passphrase: bytes | None = None) -> Pair:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    today = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encryption = (
        serialization.NoEncryption() if passphrase is None else serialization.BestAvailableEncryption(passphrase)
    )
    it = Pair(folder / f"{name}.pem", folder / f"{name}.key")
    it.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    it.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption))
    return it


def loaded(server: Pair, **more: str) -> Tls:
    tls = Tls.load(read_settings({"ssl_certfile": str(server.certificate), "ssl_keyfile": str(server.key), **more}, {}))
    assert tls is not None
    return tls


def trusting(server: Pair, client: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(server.certificate))
    if client is not None:
        context.load_cert_chain(client.certificate, client.key)
    return context


def test_a_stream_goes_over_tls_and_plain_http_gets_nothing(folder: Path, tmp_path: Path) -> None:
    server = pair(tmp_path, "server")
    with Running(served(folder), tls=loaded(server)) as api:
        answer = httpx2.post(f"{api.url}/v1/completions", json=BODY, verify=trusting(server), timeout=30)
        assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"http://127.0.0.1:{api.port}/livez", timeout=30)


def test_a_renewed_certificate_is_taken_and_a_bad_one_is_not(folder: Path, tmp_path: Path) -> None:
    server, renewed = pair(tmp_path, "server"), pair(tmp_path, "renewed")
    tls = loaded(server)
    with Running(served(folder), tls=tls) as api:
        old = trusting(server)
        assert httpx2.get(f"{api.url}/livez", verify=old, timeout=30).status_code == 200
        server.certificate.write_bytes(renewed.certificate.read_bytes())
        assert not tls.reload(), "the key is the old certificate's"
        assert httpx2.get(f"{api.url}/livez", verify=old, timeout=30).status_code == 200
        server.key.write_bytes(renewed.key.read_bytes())
        assert tls.reload()
        assert httpx2.get(f"{api.url}/livez", verify=trusting(renewed), timeout=30).status_code == 200
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{api.url}/livez", verify=old, timeout=30)


def test_a_client_without_a_certificate_is_refused(folder: Path, tmp_path: Path) -> None:
    server, client = pair(tmp_path, "server"), pair(tmp_path, "client")
    tls = loaded(server, ssl_ca_certs=str(client.certificate), ssl_cert_reqs="2")
    with Running(served(folder), tls=tls) as api:
        known = httpx2.get(f"{api.url}/livez", verify=trusting(server, client), timeout=30)
        assert known.status_code == 200
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{api.url}/livez", verify=trusting(server), timeout=30)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({"ssl_certfile": "/no/such"}, "^--ssl-certfile /no/such cannot be read: No such file or directory$"),
        ({"ssl_keyfile": "a.key"}, "^--ssl-keyfile needs --ssl-certfile"),
        ({"ssl_certfile": "a.key"}, r"^--ssl-certfile \S+a.key: expected PEM of a certificate, and of its key"),
        ({"ssl_certfile": "a.pem"}, r"^--ssl-certfile \S+a.pem: expected PEM of a certificate, and of its key"),
        ({"ssl_certfile": "a.pem", "ssl_keyfile": "b.key"}, "b.key: the key is another certificate's$"),
        ({"ssl_certfile": "c.pem", "ssl_keyfile": "c.key"}, "the key of --ssl-certfile is encrypted"),
        ({"ssl_certfile": "a.pem", "ssl_keyfile": "a.key", "ssl_ca_certs": "a.pem"}, "go together"),
        ({"ssl_certfile": "a.pem", "ssl_keyfile": "a.key", "ssl_cert_reqs": "2"}, "go together"),
        ({"ssl_certfile": "a.pem", "ssl_keyfile": "a.key", "ssl_cert_reqs": "3"}, "--ssl-cert-reqs: Expected"),
        ({"ssl_certfile": "a.pem", "ssl_keyfile": "a.key", "ssl_ciphers": "NONE"}, "OpenSSL knows no such cipher"),
        (
            {"ssl_certfile": "a.pem", "ssl_keyfile": "a.key", "ssl_ca_certs": "a.key", "ssl_cert_reqs": "1"},
            r"^--ssl-ca-certs \S+a.key: expected PEM of certificates",
        ),
    ],
)
def test_files_that_cannot_be_used_are_named(flags: dict[str, str], wanted: str, tmp_path: Path) -> None:
    pair(tmp_path, "a"), pair(tmp_path, "b"), pair(tmp_path, "c", b"secret")
    placed = {name: str(tmp_path / text) if text[0] in "abc" else text for name, text in flags.items()}
    with pytest.raises(SettingsError, match=wanted):
        Tls.load(read_settings(placed, {}))


def test_without_a_certificate_it_is_plain_http() -> None:
    assert Tls.load(Settings()) is None
