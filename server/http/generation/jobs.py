"""From a request's fields and the tokens of its prompts to jobs for the engine."""

import itertools
from dataclasses import replace

import msgspec

from server.errors import InvalidValue
from server.http.generation.prepared import Job
from server.http.generation.prompts import check_choices, check_lengths, truncated
from server.http.generation.requests import GenerationRequest
from server.http.generation.sampling import sampling_of
from server.http.generation.structured import SINGLE_FIELDS, grammar_of
from server.http.services import ServedModel
from server.protocol.messages import Grammar

_BINDING = frozenset({"response_format", "structured_outputs", *SINGLE_FIELDS})


def jobs_of(
    model: ServedModel,
    fields: GenerationRequest,
    prompts: list[list[int]],
    unique_id: str,
    max_model_len: int,
    *,
    default_tokens: int | None = None,
    may_be_less: bool = False,
) -> list[Job]:
    """A job for each answer. Raises InvalidValue and PromptTooLong.

    default_tokens  that an answer may have where the request does not say; None: as many as fit
    may_be_less     whether an answer may have fewer than `max_tokens` where the context holds no more
    """
    fields.check()
    check_choices(len(prompts), fields.n)
    limit = fields.truncate_prompt_tokens
    if limit is not None:
        wanted = default_tokens if fields.max_tokens is None else fields.max_tokens
        room, keeps_end = max_model_len - max(1, wanted or 0), fields.truncation_side != "right"
        if limit == -1 and wanted is None and max(map(len, prompts)) > room:
            message = "truncate_prompt_tokens of -1 leaves room for max_tokens, and the request has none; send it."
            raise InvalidValue(message, param="truncate_prompt_tokens")
        prompts = [truncated(prompt, limit, room, keeps_end=keeps_end) for prompt in prompts]
    grammar = None if fields.model_fields_set.isdisjoint(_BINDING) else _grammar(fields)
    stops, goes_on, param = fields.stops, fields.goes_on, fields.prompt_field
    jobs = []
    for i, ((prompt_index, prompt), choice) in enumerate(itertools.product(enumerate(prompts), range(fields.n))):
        # Where none is asked for, the token that ends the computation of the prompt is not given out.
        asked = 1 if fields.max_tokens == 0 else fields.max_tokens
        max_tokens = check_lengths(
            len(prompt), asked, default_tokens, max_model_len, param=param, may_be_less=may_be_less
        )
        sampling = sampling_of(fields, max_tokens, model.tokenizer, model.sampling_defaults, choice=choice)
        sampling = msgspec.structs.replace(sampling, grammar=grammar) if grammar is not None else sampling
        job = Job(
            i,
            f"{unique_id}-{i}",
            prompt,
            sampling,
            stops,
            priority=fields.priority,
            continues=goes_on,
            prompt_index=prompt_index,
        )
        if fields.include_stop_str_in_output or not fields.skip_special_tokens:
            job = replace(
                job,
                includes_stop=fields.include_stop_str_in_output,
                has_special_tokens=not fields.skip_special_tokens,
            )
        jobs.append(job)
    return jobs


def _grammar(fields: GenerationRequest) -> Grammar | None:
    single = {name: value for name in SINGLE_FIELDS if (value := getattr(fields, name)) is not None}
    return grammar_of(fields.response_format, fields.structured_outputs, single)
