"""Answers and events as the document shows them; `answer` writes them without pydantic."""

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from server.http.common.provenance import Provenance
from server.http.common.receipt_schema import RECEIPT, SignedReceipt
from server.http.common.schemas import PROVENANCE, Schema

_ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Schema):
    type: Literal["output_text"]
    text: str
    annotations: list[Any] = Field(max_length=0)
    logprobs: list[Any] = Field(max_length=0)


class OutputReasoningText(Schema):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Schema):
    type: Literal["message"]
    id: str
    status: _ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Schema):
    type: Literal["reasoning"]
    id: str
    status: _ItemStatus
    summary: list[Any] = Field(max_length=0)
    content: list[OutputReasoningText] = Field([], description="Absent while the item is in progress.")


class OutputCall(Schema):
    type: Literal["function_call"]
    id: str
    status: _ItemStatus
    call_id: str
    name: str
    namespace: str | None = Field(None, description="Only of a function in a namespace.")
    arguments: str = Field(description="JSON, if the model has written JSON.")


class OutputCustomCall(Schema):
    type: Literal["custom_tool_call"]
    id: str
    status: _ItemStatus
    call_id: str
    name: str
    namespace: str | None = Field(None, description="Only of a tool in a namespace.")
    input: str


class OutputSearch(Schema):
    type: Literal["tool_search_call"]
    id: str
    status: _ItemStatus
    call_id: str
    execution: Literal["client"]
    arguments: dict[str, Any] = Field(description="`malformed_arguments` where the model has written no JSON object.")


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputCustomCall | OutputSearch


class InputTokensDetails(Schema):
    cached_tokens: int = Field(description="Tokens of the prompt that were not computed again.")
    cache_write_tokens: Literal[0]


class OutputTokensDetails(Schema):
    reasoning_tokens: int


class ResponseUsage(Schema):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Schema):
    reason: Literal["max_output_tokens"]


class ResponseFailure(Schema):
    code: Literal["server_error"]
    message: str


class ReasoningUsed(Schema):
    effort: str | None
    summary: None


class TextUsed(Schema):
    format: dict[str, Any]
    verbosity: str | None = Field(None, description="The request's.")


class ResponseAnswer(Schema):
    """An answer, and what it says of its request."""

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Unix seconds.")
    completed_at: int | None
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem] = Field(description="Empty in the events before the last.")
    usage: ResponseUsage | None
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str] = Field(
        description="The request's, and `left_out_tools`: types of tools that the model did not see."
    )
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningUsed
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextUsed
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: Literal[0]
    top_p: float
    truncation: Literal["disabled"]
    user: str | None
    hallmark: Provenance | None = PROVENANCE
    receipt: SignedReceipt | None = RECEIPT


class _Event(Schema):
    sequence_number: int = Field(description="From 0.")


class _ItemEvent(_Event):
    item_id: str
    output_index: int


class ResponseEvent(_Event):
    hallmark: Provenance | None = PROVENANCE
    receipt: SignedReceipt | None = RECEIPT
    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
    ]
    response: ResponseAnswer


class OutputItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ContentPartEvent(_ItemEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: Literal[0]
    part: OutputText | OutputReasoningText


class OutputTextDelta(_ItemEvent):
    type: Literal["response.output_text.delta"]
    content_index: Literal[0]
    delta: str
    logprobs: list[Any] = Field(max_length=0)


class OutputTextDone(_ItemEvent):
    type: Literal["response.output_text.done"]
    content_index: Literal[0]
    text: str
    logprobs: list[Any] = Field(max_length=0)


class ReasoningTextDelta(_ItemEvent):
    type: Literal["response.reasoning_text.delta"]
    content_index: Literal[0]
    delta: str


class ReasoningTextDone(_ItemEvent):
    type: Literal["response.reasoning_text.done"]
    content_index: Literal[0]
    text: str


class ArgumentsDelta(_ItemEvent):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_ItemEvent):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomInputDelta(_ItemEvent):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str = Field(description="The whole input.")


class CustomInputDone(_ItemEvent):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ErrorEvent(_Event):
    type: Literal["error"]
    code: str
    message: str
    param: str | None
    request_id: str
    trace_id: str


_StreamEvent = Annotated[
    ResponseEvent
    | OutputItemEvent
    | ContentPartEvent
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | CustomInputDone
    | ErrorEvent,
    Field(discriminator="type"),
]


class ResponseStreamEvent(RootModel[_StreamEvent]):
    """One of the events of a stream, named by its `type`; `response.failed` comes behind `error`."""


class ResponseDeleted(Schema):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputText(Schema):
    type: Literal["input_text"]
    text: str


class InputImagePart(Schema):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"]


class InputMessage(Schema):
    type: Literal["message"]
    id: str
    status: _ItemStatus
    role: Literal["developer", "system", "user"]
    content: list[InputText | InputImagePart]


class InputCallOutput(Schema):
    type: Literal["function_call_output", "custom_tool_call_output"]
    id: str
    status: _ItemStatus
    call_id: str
    output: str | list[InputText | InputImagePart]


class InputSearchOutput(Schema):
    type: Literal["tool_search_output"]
    id: str
    status: _ItemStatus
    call_id: str
    execution: Literal["client"]
    tools: list[dict[str, Any]]


class InputTools(Schema):
    type: Literal["additional_tools"]
    id: str
    status: _ItemStatus
    role: Literal["developer"]
    tools: list[dict[str, Any]]


class InputReasoningPart(Schema):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputReasoning(Schema):
    type: Literal["reasoning"]
    id: str
    status: _ItemStatus
    summary: list[InputReasoningPart]
    content: list[InputReasoningPart]


class InputItemList(Schema):
    object: Literal["list"]
    data: list[
        InputMessage
        | OutputMessage
        | OutputCall
        | OutputCustomCall
        | OutputSearch
        | InputCallOutput
        | InputSearchOutput
        | InputTools
        | InputReasoning
    ]
    has_more: bool
    first_id: str | None = Field(description="null where nothing is listed.")
    last_id: str | None
