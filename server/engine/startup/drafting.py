"""The setting of drafted tokens, in the format of vLLM's flag."""

from typing import Annotated

import msgspec
from msgspec import Meta

from server.engine.scheduling.drafter import Drafter
from server.engine.scheduling.ngram_drafter import NgramDrafter
from server.errors import SettingsError
from server.settings import Settings

MOST_DRAFTED = 4  # tokens of a sequence and step
_MOST_COMPARED = 64
_NGRAM = "ngram"
_FLAG = "--speculative-config"


class Drafting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens that are drafted for each sequence and step, and the least and most tokens before them that are alike."""

    method: str
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MOST_DRAFTED)]
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=_MOST_COMPARED)] | None = None
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=_MOST_COMPARED)] | None = None

    @property
    def lookup(self) -> tuple[int, int]:
        """Return the least and the most tokens that must be alike; one alone stands for both, and none for 5."""
        least = self.prompt_lookup_min or self.prompt_lookup_max or 5
        return least, self.prompt_lookup_max or least

    def drafter(self, num_seqs: int) -> Drafter:
        """Return what drafts for as many sequences at once."""
        least, longest = self.lookup
        return NgramDrafter(least=least, longest=longest, most_sequences=num_seqs)


def drafting_of(settings: Settings) -> Drafting | None:
    """Return how tokens are drafted; None where the settings ask for none.

    Raises SettingsError for what cannot be read, and another method.
    """
    text = settings.speculative_config
    if text is None:
        return None
    try:
        found = msgspec.json.decode(text, type=Drafting)
    except msgspec.MsgspecError as error:
        raise SettingsError(f"{_FLAG} cannot be read: {error}") from error
    if found.method != _NGRAM:
        raise SettingsError(f"{_FLAG} asks for the method {found.method[:64]!r}, {_NGRAM} is the only one")
    least, longest = found.lookup
    if least > longest:
        raise SettingsError(f"{_FLAG}: prompt_lookup_min is {least}, it must be at most prompt_lookup_max, {longest}")
    return found
