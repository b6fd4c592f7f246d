"""A valid request with its tokens, as jobs for the engine."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from server.protocol.images import PromptImages
from server.protocol.messages import SamplingParams
from server.text.answer.parser import AnswerParser


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt of a request, and one answer to it."""

    index: int
    engine_id: str  # unique in the engine
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stops: tuple[str, ...]
    parser: AnswerParser | None = None  # None: all of the answer is content
    includes_stop: bool = False  # what ends the answer is part of its text
    has_special_tokens: bool = False  # special tokens have a text
    priority: int = 0
    continues: bool = False  # its text goes on from the prompt's; else it is a text of its own, as a chat's turn is
    prompt_index: int | None = None  # which of the request's prompts, where jobs of one differ by seed and parser alone
    images: PromptImages | None = None  # of the prompt, shared by the jobs of one; None: it has none


FieldsT_co = TypeVar("FieldsT_co", covariant=True)
OtherT = TypeVar("OtherT")


@dataclass(frozen=True, slots=True)
class Prepared(Generic[FieldsT_co]):
    """A valid request with its tokens."""

    fields: FieldsT_co  # as its own protocol has them
    jobs: list[Job]
    is_stream: bool = False
    cache_salt: str | None = None
    timeout_s: float | None = None  # the request's own limit, counted from its arrival
    wants_receipt: bool = False
    may_have_receipt: bool = True  # whether it has answers, which a receipt is of
    # Of each prompt, as it was rendered, for a receipt alone; None where token ids were sent.
    texts: Callable[[], tuple[str | None, ...]] = tuple

    def of(self, fields: OtherT) -> "Prepared[OtherT]":
        """The same tokens for the request that this one was made of."""
        return Prepared(
            fields,
            self.jobs,
            self.is_stream,
            self.cache_salt,
            self.timeout_s,
            self.wants_receipt,
            self.may_have_receipt,
            self.texts,
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each once, however many answers it has."""
        return sum(len(job.prompt_token_ids) for job, is_first in zip(self.jobs, self.firsts, strict=True) if is_first)

    @property
    def num_image_bytes(self) -> int:
        """Bytes of the images of all prompts, each once."""
        firsts = zip(self.jobs, self.firsts, strict=True)
        return sum(job.images.num_bytes for job, is_first in firsts if is_first and job.images is not None)

    @property
    def firsts(self) -> list[bool]:
        """For each job, whether it is the first of its prompt, which is computed for all of them."""
        jobs = self.jobs
        if len(jobs) == 1:
            return [True]
        first = {job.prompt_index: at for at, job in reversed([*enumerate(jobs)])}
        return [job.prompt_index is None or first[job.prompt_index] == at for at, job in enumerate(jobs)]

    @property
    def num_choices(self) -> dict[int, int]:
        """The number of answers to each prompt that has several, by the prompt's index."""
        if len(self.jobs) == 1:
            return {}
        counts = Counter(job.prompt_index for job in self.jobs if job.prompt_index is not None)
        return {index: count for index, count in counts.items() if count > 1}
