"""From a chat's body to its prompt's tokens, for its own route and for those whose requests are translated to it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from server.errors import InvalidValue
from server.grammar.reasoning import behind_reasoning
from server.http.chat.rendering import Conversation, PromptEnd, chat_text, conversation_of, end_of
from server.http.chat.requests import ChatRequest
from server.http.chat.tools import ToolUse
from server.http.common.validation import read, translated, translated_name
from server.http.generation.jobs import jobs_of
from server.http.generation.prepared import Job, Prepared
from server.http.generation.prompts import encode_chat
from server.http.generation.structured import is_of_format
from server.http.services import ServedModel
from server.protocol.messages import EngineReady, GrammarKind


def prepare_translated(
    model: ServedModel, unique_id: str, ready: EngineReady, body: dict[str, Any], names: Mapping[str, str]
) -> Prepared[ChatRequest]:
    """Tokenize a chat that was made of another protocol's request; `names` as for `translated`.

    In those protocols the tokens that an answer may have are a bound, which may be beyond the context's end: agents
    send one number, 64,000 say, whatever the model.
    """
    with translated(names):
        prepared = prepare_chat(model, unique_id, ready, body, may_be_less=True)
    return replace(prepared, jobs=[_named(job, names) for job in prepared.jobs])


def prompt_tokens(model: ServedModel, body: dict[str, Any], names: Mapping[str, str]) -> int:
    """The number of tokens of a translated chat as a prompt, also where the context does not hold them."""
    with translated(names):
        fields = read(ChatRequest, body)
        model.check_name(fields.model)
        return len(model.tokenizer.encode(_prompt_text(model, fields, _tools(fields)), add_special_tokens=False))


def prepare_chat(
    model: ServedModel, unique_id: str, ready: EngineReady, body: dict[str, Any], *, may_be_less: bool = False
) -> Prepared[ChatRequest]:
    """Validate a chat's body and tokenize it.

    may_be_less  whether an answer may have fewer than `max_tokens` where the context holds no more; else 400
    """
    fields = read(ChatRequest, body)
    model.check_name(fields.model)
    if fields.max_completion_tokens is not None:
        if fields.max_tokens not in (None, fields.max_completion_tokens):
            raise InvalidValue("max_tokens and max_completion_tokens differ; send one.", param="max_tokens")
        fields = fields.model_copy(update={"max_tokens": fields.max_completion_tokens})
    tools = _tools(fields)
    text = _prompt_text(model, fields, tools)
    prompt = encode_chat(model.tokenizer, text, ready.max_model_len, add_special_tokens=fields.add_special_tokens)
    jobs = jobs_of(model, fields, [prompt], unique_id, ready.max_model_len, may_be_less=may_be_less)
    jobs = [_parsed(model, fields, tools, text, job) for job in jobs]
    return Prepared(
        fields,
        jobs,
        fields.stream,
        fields.cache_salt,
        fields.timeout,
        wants_receipt=fields.receipt,
        texts=(text if fields.truncate_prompt_tokens is None else None,),
    )


def _tools(fields: ChatRequest) -> ToolUse:
    return ToolUse(fields.tools, fields.tool_choice, is_parallel=fields.parallel_tool_calls)


def prompt_text(model: ServedModel, conversation: Conversation, end: PromptEnd) -> str:
    """The text of a conversation by the model's own template. Raises TemplateError, InvalidValue, UnsupportedField."""
    return chat_text(
        model.tokenizer,
        model.template,
        conversation,
        syntax=model.syntax,
        end=end,
        special_tokens_in_text=model.special_tokens_in_text,
    )


def _prompt_text(model: ServedModel, fields: ChatRequest, tools: ToolUse) -> str:
    end = end_of(fields.add_generation_prompt, continues=fields.continue_final_message)
    return prompt_text(model, conversation_of(fields, tools), end)


def _parsed(model: ServedModel, fields: ChatRequest, tools: ToolUse, prompt: str, job: Job) -> Job:
    """The job with a parser of its answer, and bound to a call where the request asks for one.

    What binds an answer begins behind its reasoning. One that is bound to JSON may be a call instead where there are
    tools. Raises UnsupportedField, and InvalidValue for a call that is no such answer.
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
    if grammar is not None and not fields.continue_final_message:
        reasoning = model.syntax.reasoning_before(prompt)
        if reasoning is not None:
            grammar = behind_reasoning(grammar, reasoning, model.tokenizer.added_ids, has_head=calls is None)
    parser = model.syntax.parser(
        tools.schemas if may_call else None,
        prompt,
        is_streamed=fields.stream,
        is_bound=grammar is not None,
        is_forced=tools.is_forced,
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
