"""From a chat's body to its prompt's tokens, for its own route and for those whose requests are translated to it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from server.errors import InvalidValue, UnsupportedField
from server.grammar.reasoning import behind_reasoning
from server.http.chat.image_places import check_bounds, check_images, text_with_borders, with_image_tokens
from server.http.chat.rendering import Conversation, PromptEnd, chat_text, conversation_of, end_of
from server.http.chat.requests import ChatRequest
from server.http.chat.tools import ToolUse
from server.http.common.validation import read, translated, translated_name
from server.http.generation.jobs import jobs_of
from server.http.generation.prepared import Job, Prepared
from server.http.generation.prompts import encode_chat, held
from server.http.generation.structured import is_of_format
from server.http.images.source import RequestImages
from server.http.services import ServedModel
from server.model.images.process import ProcessedImage
from server.protocol.images import PromptImages
from server.protocol.messages import EngineReady, GrammarKind


def prepare_translated(
    model: ServedModel,
    unique_id: str,
    ready: EngineReady,
    body: dict[str, Any],
    images: RequestImages,
    names: Mapping[str, str],
) -> Prepared[ChatRequest]:
    """Tokenize a chat that was made of another protocol's request; `names` as for `translated`. Raises ImagesNeeded.

    In those protocols the tokens that an answer may have are a bound, which may be beyond the context's end: agents
    send one number, 64,000 say, whatever the model.
    """
    with translated(names):
        prepared = prepare_chat(model, unique_id, ready, body, images, may_be_less=True)
    return replace(prepared, jobs=[_named(job, names) for job in prepared.jobs])


def prompt_tokens(
    model: ServedModel, ready: EngineReady, body: dict[str, Any], images: RequestImages, names: Mapping[str, str]
) -> int:
    """The number of tokens of a translated chat as a prompt, also where the context does not hold them.

    Raises ImagesNeeded.
    """
    with translated(names):
        fields = read(ChatRequest, body)
        model.check_name(fields.model)
        conversation = conversation_of(fields, _tools(fields))
        read_images = checked_images(model, ready, conversation, images)
        text = prompt_text(model, conversation, _end(fields))
        num_tokens = len(model.tokenizer.encode(text, add_special_tokens=False))
        return num_tokens + sum(image.num_tokens - 1 for image in read_images)


def checked_images(
    model: ServedModel, ready: EngineReady, conversation: Conversation, images: RequestImages
) -> list[ProcessedImage]:
    """The images of a conversation, in order. Raises ImagesNeeded, UnsupportedField and InvalidValue."""
    check_images(model, ready, [source.place for source in conversation.images], "image_url")
    return images.of(conversation.images)


def prepare_chat(
    model: ServedModel,
    unique_id: str,
    ready: EngineReady,
    body: dict[str, Any],
    images: RequestImages,
    *,
    may_be_less: bool = False,
) -> Prepared[ChatRequest]:
    """Validate a chat's body and tokenize it. Raises ImagesNeeded where it has images that are still to be read.

    may_be_less  whether an answer may have fewer than `max_tokens` where the context holds no more; else 400
    """
    fields = read(ChatRequest, body)
    model.check_name(fields.model)
    if fields.max_completion_tokens is not None:
        if fields.max_tokens not in (None, fields.max_completion_tokens):
            raise InvalidValue("max_tokens and max_completion_tokens differ; send one.", param="max_tokens")
        fields = fields.model_copy(update={"max_tokens": fields.max_completion_tokens})
    tools = _tools(fields)
    check_bounds(model, fields.mm_processor_kwargs)
    conversation = conversation_of(fields, tools)
    if conversation.images:
        _check_fields_beside_images(fields)
    made = chat_ids(
        model,
        ready,
        conversation,
        _end(fields),
        images,
        add_special_tokens=fields.add_special_tokens,
        keeps_end=None if fields.truncate_prompt_tokens is None else fields.truncation_side != "right",
    )
    prompt, text, placed = made.token_ids, made.text, made.images
    jobs = jobs_of(model, fields, [prompt], unique_id, ready.max_model_len, may_be_less=may_be_less)
    # An answer that goes on with reasoning begins with it.
    left = model.syntax.reasoning_of(conversation.messages[-1]["content"]) if fields.continue_final_message else ""
    jobs = [job if placed is None else replace(job, images=placed) for job in jobs]
    jobs = [
        _parsed(model, fields, tools, text + left, job, may_reason=not fields.goes_on or bool(left)) for job in jobs
    ]
    return Prepared(
        fields,
        jobs,
        fields.stream,
        fields.cache_salt,
        fields.timeout,
        wants_receipt=fields.receipt,
        may_have_receipt=placed is None,
        texts=lambda: (text if fields.truncate_prompt_tokens is None else None,),
    )


@dataclass(frozen=True, slots=True)
class ChatIds:
    """A conversation as a prompt."""

    token_ids: list[int]
    text: str
    images: PromptImages | None


def chat_ids(
    model: ServedModel,
    ready: EngineReady,
    conversation: Conversation,
    end: PromptEnd,
    images: RequestImages,
    *,
    add_special_tokens: bool = False,
    keeps_end: bool | None = None,
) -> ChatIds:
    """Tokenize a conversation, with the tokens of its images. Raises ImagesNeeded, and RequestError.

    keeps_end  of a prompt that will be cut, whether its end stays, or its beginning; None: nothing is cut
    """
    read_images = checked_images(model, ready, conversation, images)
    text = prompt_text(model, conversation, end)
    longest = ready.max_model_len
    kept = text if keeps_end is None else held(text, longest, keeps_end=keeps_end)
    token_ids = encode_chat(model.tokenizer, kept, longest, add_special_tokens=add_special_tokens)
    if model.images is None or not read_images:
        return ChatIds(token_ids, text, None)
    token_ids, placed = with_image_tokens(token_ids, read_images, model.images.settings, model.tokenizer, ready)
    return ChatIds(token_ids, text, PromptImages(placed))


def _tools(fields: ChatRequest) -> ToolUse:
    return ToolUse(fields.tools, fields.tool_choice, is_parallel=fields.parallel_tool_calls)


def prompt_text(model: ServedModel, conversation: Conversation, end: PromptEnd) -> str:
    """The text of a conversation by the model's own template. Raises TemplateError, InvalidValue, UnsupportedField."""
    text = chat_text(
        model.tokenizer,
        model.template,
        conversation,
        syntax=model.syntax,
        end=end,
        special_tokens_in_text=model.special_tokens_in_text,
    )
    if model.images is None or not conversation.images:
        return text
    return text_with_borders(text, model.images.settings.tokens, model.tokenizer)


def _end(fields: ChatRequest) -> PromptEnd:
    return end_of(fields.add_generation_prompt, continues=fields.continue_final_message)


def _check_fields_beside_images(fields: ChatRequest) -> None:
    """Raises UnsupportedField for what a prompt with images cannot have."""
    if fields.truncate_prompt_tokens is not None:
        message = "truncate_prompt_tokens is not implemented for prompts with images, which it may cut."
        raise UnsupportedField(message, param="truncate_prompt_tokens")
    if fields.receipt:
        message = "receipt is not implemented for prompts with images: a receipt is of token ids."
        raise UnsupportedField(message, param="receipt")


def _parsed(model: ServedModel, fields: ChatRequest, tools: ToolUse, prompt: str, job: Job, *, may_reason: bool) -> Job:
    """The job with a parser of its answer, and bound to a call where the request asks for one.

    What binds an answer begins behind its reasoning, if it `may_reason`. One that is bound to JSON may be a call
    instead where there are tools. Raises UnsupportedField, and InvalidValue for a call that is no such answer.
    """
    grammar, calls = job.sampling.grammar, None
    if tools.is_forced and grammar is not None:
        if not is_of_format(grammar):
            message = f"tool_choice and {grammar.param} both say what the answer must match; send one."
            raise InvalidValue(message, param=grammar.param)
        grammar = None  # OpenAI's: the format is of text, and the answer is a call
    may_call = tools.schemas is not None and (grammar is None or grammar.kind is GrammarKind.JSON_SCHEMA)
    if may_call and (tools.is_forced or grammar is not None):
        bound = tools.bound(model.syntax.calls, model.tokenizer.added_ids, grammar)
        grammar, calls = bound.grammar, bound.form
    if grammar is not None and may_reason:
        reasoning = model.syntax.reasoning_before(prompt)
        if reasoning is not None:
            grammar = behind_reasoning(grammar, reasoning, model.tokenizer.added_ids, has_head=calls is None)
    parser = model.syntax.parser(
        tools.schemas if may_call else None,
        prompt,
        is_streamed=fields.stream,
        is_bound=grammar is not None,
        is_forced=tools.is_forced,
        is_limited=tools.is_limited,
        calls=calls,
        include_reasoning=fields.include_reasoning,
        parallel_tool_calls=fields.parallel_tool_calls,
    )
    if grammar is job.sampling.grammar and parser is None:  # as in most chats
        return job
    return replace(job, sampling=msgspec.structs.replace(job.sampling, grammar=grammar), parser=parser)


def _named(job: Job, names: Mapping[str, str]) -> Job:
    """The job, whose grammar names the client's own field."""
    grammar = job.sampling.grammar
    if grammar is None:
        return job
    grammar = msgspec.structs.replace(grammar, param=translated_name(grammar.param, names))
    return replace(job, sampling=msgspec.structs.replace(job.sampling, grammar=grammar))
