"""TLS of the API and the admin port, from the files that `--ssl-certfile` and its like name."""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from server.errors import SettingsError
from server.settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tls:
    """The context of every connection, and where its certificate is from."""

    context: ssl.SSLContext
    certificate: Path
    key: Path | None  # None: in the certificate's file

    @classmethod
    def load(cls, settings: Settings) -> "Tls | None":
        """Read the files of the settings; None where they name no certificate. Raises SettingsError."""
        if settings.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"):
                if getattr(settings, name):
                    raise SettingsError(f"--{name.replace('_', '-')} needs --ssl-certfile, the server's certificate")
            return None
        if (settings.ssl_ca_certs is None) != (settings.ssl_cert_reqs == ssl.CERT_NONE):
            raise SettingsError(
                "--ssl-ca-certs and --ssl-cert-reqs 1 or 2 go together: clients' certificates are checked by both"
            )
        key = None if settings.ssl_keyfile is None else Path(settings.ssl_keyfile)
        tls = cls(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), Path(settings.ssl_certfile), key)
        tls._load_certificate(tls.context)
        tls.context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
        if settings.ssl_ca_certs is not None:
            _check_readable("--ssl-ca-certs", Path(settings.ssl_ca_certs))
            try:
                tls.context.load_verify_locations(settings.ssl_ca_certs)
            except ssl.SSLError as error:
                reason = (error.reason or "no reason").lower().replace("_", " ")
                raise SettingsError(
                    f"--ssl-ca-certs {settings.ssl_ca_certs}: expected PEM of certificates ({reason})"
                ) from None
        if settings.ssl_ciphers is not None:
            try:
                tls.context.set_ciphers(settings.ssl_ciphers)
            except ssl.SSLError:
                raise SettingsError(f"--ssl-ciphers {settings.ssl_ciphers}: OpenSSL knows no such cipher") from None
        return tls

    def reload(self) -> bool:
        """Read certificate and key again, for new connections; return whether it worked, else the old ones stay."""
        try:
            self._load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # or half of a bad pair would be taken
            self._load_certificate(self.context)
        except SettingsError as error:
            logger.error("the certificate stays as it was: %s", error.message)
            return False
        logger.info("read the certificate %s again", self.certificate)
        return True

    def _load_certificate(self, context: ssl.SSLContext) -> None:
        _check_readable("--ssl-certfile", self.certificate)
        if self.key is not None:
            _check_readable("--ssl-keyfile", self.key)
        try:
            context.load_cert_chain(self.certificate, self.key, _no_passphrase)
        except ssl.SSLError as error:
            both = "" if self.key is None else f" and --ssl-keyfile {self.key}"
            raise SettingsError(f"--ssl-certfile {self.certificate}{both}: {_reason(error)}") from None


def _no_passphrase() -> str:
    raise SettingsError(
        "the key of --ssl-certfile is encrypted, and there is no passphrase: write it without one (`openssl pkey`), of "
        "mode 0600"
    )


def _check_readable(flag: str, file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as error:
        raise SettingsError(f"{flag} {file} cannot be read: {error.strerror}") from None


def _reason(error: ssl.SSLError) -> str:
    """Return OpenSSL's reason in words; those for a file of something else differ between its versions."""
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is another certificate's"
    return f"expected PEM of a certificate, and of its key ({(error.reason or 'no reason').lower().replace('_', ' ')})"
