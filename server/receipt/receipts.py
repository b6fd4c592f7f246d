"""The signer of a server's receipts, which also draws the seeds that they name."""

from dataclasses import dataclass, field
from random import Random

from server.receipt.keyring import KeyRing
from server.settings import ReceiptMode, Settings


@dataclass(frozen=True, slots=True)
class Receipts:
    """The key that signs, and a source of seeds."""

    keys: KeyRing
    seeds: Random = field(default_factory=Random)

    @classmethod
    def load(cls, settings: Settings) -> "Receipts | None":
        """Read or make the key; None where the server gives no receipts. Raises SettingsError."""
        if settings.receipts is ReceiptMode.OFF:
            return None
        return cls(KeyRing.load(settings), Random(settings.seed))

    def draw_seed(self) -> int:
        """The seed of an answer whose request names none, as the engine would draw it."""
        return self.seeds.getrandbits(31)
