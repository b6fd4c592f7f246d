"""Record on disk of paths that broke in service: none of them serves until the stack or its source changes.

A file of its own for each stack, beside the machine's own evidence. Removing it gives every path another chance.
"""

import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from kernels.system.shared_folder import only_writer
from kernels.system.whole_file import write_whole
from kernels.vocabulary.path import AnyPath
from qualification.common.regular_file import read_regular
from server.protocol.messages import AttestationReport, EngineFailed, FromEngine, ShadowReport, StepOutput

logger = logging.getLogger(__name__)

Pair = tuple[str, str]  # path, str(shape)
_Key = tuple[str, str, str]  # and the source's digest: servers of two versions may share the file


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    shape: str
    source_digest: str
    at: str
    why: str


class Quarantine:
    """The (path, shape) pairs of one stack."""

    def __init__(self, file: Path, paths: Iterable[AnyPath]) -> None:
        """Reads the file, if there is one. One that cannot be read is logged, and replaced by the next failure."""
        self._file = file
        self._digests = {path.name: path.source_digest for path in paths}
        self._entries = self._read()
        for entry in sorted(self._standing(), key=lambda entry: (entry.path, entry.shape)):
            logger.warning("%s is quarantined for %s: %s", entry.path, entry.shape, entry.why)

    @property
    def pairs(self) -> frozenset[Pair]:
        """Return the pairs whose kernel source has not changed since it broke."""
        return frozenset((entry.path, entry.shape) for entry in self._standing())

    def add(self, pairs: Iterable[Pair], why: str) -> None:
        """Keep what broke, beside what other servers have kept meanwhile.

        A disk that cannot be written to is logged: the running server does without the path.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        for path, shape in pairs:
            digest = self._digests.get(path)
            if digest is not None:
                self._entries[path, shape, digest] = _Entry(path, shape, digest, now, why)
        try:
            with only_writer(self._file.parent):
                self._entries = self._read() | self._entries
                content = msgspec.json.format(msgspec.json.encode(list(self._entries.values())), indent=1)
                write_whole(self._file, content, mode=0o600)
        except OSError as error:
            folder, problem = self._file.parent, error.strerror or error
            logger.error("what broke cannot be kept for the next start in %s: %s", folder, problem)
        else:
            logger.warning("quarantined until its source or the stack changes, or %s is removed", self._file)

    def keeping(self, send: Callable[[FromEngine], None]) -> Callable[[FromEngine], None]:
        """`send`, before which everything that a message reports as broken is on disk."""

        def send_kept(message: FromEngine) -> None:
            if isinstance(message, StepOutput) and message.record.quarantined:
                self.add(message.record.quarantined, "it could not be launched")
            elif isinstance(message, AttestationReport) and message.quarantined:
                self.add(message.quarantined, "it failed an attestation")
            elif isinstance(message, ShadowReport) and message.quarantined:
                self.add(message.quarantined, "shadow checks called it wrong")
            elif isinstance(message, EngineFailed) and message.suspects:
                self.add(message.suspects, f"the device was lost: {message.message}")
            send(message)

        return send_kept

    def _standing(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if self._digests.get(entry.path) == entry.source_digest]

    def _read(self) -> dict[_Key, _Entry]:
        try:
            entries = msgspec.json.decode(read_regular(self._file), type=list[_Entry])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            logger.error("what broke before is not known, %s cannot be read: %s", self._file, error)
            return {}
        return {(entry.path, entry.shape, entry.source_digest): entry for entry in entries}
