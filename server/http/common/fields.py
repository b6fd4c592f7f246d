"""Types of the fields that requests of several protocols share: one set of bounds for all of them.

A field that repeats a type may describe it in other words; its bounds stay.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, ValidationError, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

from server.http.common.validation import NO_EFFECT, JsonObject, Text, tag
from server.text.sampling_defaults import LEAST_REPETITION_PENALTY

MAX_TOKENS = 2**31 - 1
MAX_MESSAGES = 2048
MAX_TOOLS = 512
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_BIASES = 1024  # tokens, also of those allowed; each costs every step of the answer
MAX_BAD_WORDS = 128
_RECOMMENDED = "Default: the model's generation_config.json"


def one_of(choose: Any, wanted: str) -> Discriminator:
    """The type of a union's value is chosen by `choose`, before anything is validated."""
    return Discriminator(choose, custom_error_type="wrong_type", custom_error_message=wanted)


def kind_of_item(value: Any) -> str | None:
    """The tag of a text or of a list."""
    return "=text" if isinstance(value, str) else "=list" if isinstance(value, list) else None


def _biases(value: Any, validate: Any) -> dict[str, float]:
    try:
        biases: dict[str, float] = validate(value)
    except ValidationError:
        wanted = f"an object of at most {MAX_BIASES} token ids, each with a number of -100 to 100"
        raise PydanticCustomError("token_biases", wanted) from None  # a name may be any text: it is not repeated
    return biases


ModelName = Annotated[str | None, Field(description="A name of the served model; another one is refused with 404.")]
Stream = Annotated[bool, Field(description="Whether the answer comes as server-sent events.")]
HallmarkWanted = Annotated[
    bool, Field(description="Whether the answer names the kernels that served it, as the header `X-Hallmark: 1` asks.")
]
ReceiptWanted = Annotated[
    bool,
    Field(description="Whether the answer has a signed receipt, by which `hallmark verify` computes it again."),
]
CacheSalt = Annotated[
    str | None,
    Field(min_length=1, max_length=512, description="Computed prompts are shared with requests of the same salt only."),
]
Priority = Annotated[
    int,
    Field(
        ge=-(2**31),
        le=2**31 - 1,
        description="Prompts of a lower one go first; where pages lack, answers of the highest give way.",
    ),
]
Timeout = Annotated[
    float | None,
    Field(
        gt=0, description="Seconds from its arrival that the request may take; the server's own limit holds as well."
    ),
]
AnyObject = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {}}, mode="validation")]


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema; raise for one that takes no object, as the arguments of a call are. OpenAI refuses it, too."""
    kind = schema.get("type")
    if kind not in (None, "object") and not (isinstance(kind, list) and "object" in kind):
        raise PydanticCustomError("no_object", "a JSON schema whose type is object")
    return schema


ArgumentsSchema = Annotated[JsonObject, AfterValidator(_of_object)]
Label = Annotated[Text, Field(max_length=512)]
ForWhom = Annotated[Label | None, Field(description=f"{NO_EFFECT}: an identifier of your end user, not stored.")]
RequestId = Annotated[Label | None, Field(description=f"{NO_EFFECT}: send the header X-Request-Id.")]

TokenCount = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Temperature = Annotated[
    float | None, Field(ge=0, le=2, description=f"0 takes the likeliest token. {_RECOMMENDED}, else 1.")
]
TopP = Annotated[
    float | None, Field(ge=0, le=1, description=f"0 takes the likeliest token. {_RECOMMENDED}, else 1: no limit.")
]
TopK = Annotated[int | None, Field(ge=-1, le=MAX_TOKENS, description=f"-1 and 0: no limit. {_RECOMMENDED}.")]
MinP = Annotated[float | None, Field(ge=0, le=1, description=f"{_RECOMMENDED}, else 0: no limit.")]
Seed = Annotated[
    int | None,
    Field(ge=-(2**63), le=2**63 - 1, description="Choice i of a prompt has the seed plus i. Default: a random one."),
]
RepetitionPenalty = Annotated[
    float | None,
    Field(
        ge=LEAST_REPETITION_PENALTY,
        le=10,
        description=f"Above 1: tokens of the prompt and the answer are less likely. {_RECOMMENDED}, else 1.",
    ),
]
PresencePenalty = Annotated[float, Field(ge=-2, le=2, description="Taken once from tokens that the answer has.")]
FrequencyPenalty = Annotated[float, Field(ge=-2, le=2, description="Taken for each time that the answer has a token.")]
IgnoreEos = Annotated[bool, Field(description="Whether the model's end token does not end an answer.")]
IncludeStop = Annotated[
    bool, Field(description="Whether the stop string or stop token that ends an answer is part of its text.")
]
SkipSpecialTokens = Annotated[bool, Field(description="Whether special tokens of an answer are left out of its text.")]
ChatTemplateKwargs = Annotated[
    JsonObject | None,
    Field(description="Variables for the chat template, such as `enable_thinking`; others have no effect."),
]

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)]
Stop = Annotated[
    Annotated[
        Annotated[StopString, tag("text")] | Annotated[StopStrings, tag("list")],
        one_of(kind_of_item, "a string or a list of strings"),
    ]
    | None,
    Field(
        description="Strings that end an answer; they are not part of it. The text of a special token may be one; "
        "within a longer string it is found only where `skip_special_tokens` is false."
    ),
]
Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    Field(
        max_length=MAX_BIASES,
        description=f"Token ids, and what is added to their logits before penalties; {MAX_BIASES} of them at most.",
    ),
    WrapValidator(_biases),
]
LimitedId = Annotated[int, Field(ge=0, description="Below the size of the model's vocabulary.")]  # of a short list
AllowedIds = Annotated[
    list[LimitedId],
    Field(
        max_length=MAX_BIASES, fail_fast=True, description="The only tokens that an answer may have; none given: any."
    ),
]
StopTokenIds = Annotated[
    list[LimitedId],
    Field(
        max_length=MAX_STOP_TOKEN_IDS,
        fail_fast=True,
        description="Tokens that end an answer as the model's own end token does.",
    ),
]
BadWords = Annotated[
    list[StopString],
    Field(
        max_length=MAX_BAD_WORDS,
        fail_fast=True,
        description="Texts whose tokens no answer has, alone or behind a space.",
    ),
]
