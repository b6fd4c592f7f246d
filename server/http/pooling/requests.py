"""Requests of the routes that pool. A field that is not implemented is refused by its name, never ignored."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from server.http.common.fields import (
    MAX_TOKENS,
    CacheSalt,
    ForWhom,
    HallmarkWanted,
    ModelName,
    RequestId,
    kind_of_item,
    one_of,
)
from server.http.common.inputs import MAX_INPUTS, Inputs
from server.http.common.validation import RequestModel, Text, tag

_Instruction = Annotated[Text, Field(min_length=1, max_length=4096)]


_Texts = Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
_TextOrTexts = Annotated[
    Annotated[Text, tag("text")] | Annotated[_Texts, tag("list")],
    one_of(kind_of_item, "a string or a list of strings"),
]

# Fields that vLLM and others define and that are not implemented, each with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "receipt": (False,),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),
    "use_activation": (True,),
}


class PoolingRequest(RequestModel):
    """The fields of all routes that pool."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = _UNSUPPORTED

    model: ModelName = None
    cache_salt: CacheSalt = None
    request_id: RequestId = None
    user: ForWhom = None
    hallmark: HallmarkWanted = False


class EmbeddingRequest(PoolingRequest):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = _UNSUPPORTED | {
        "add_generation_prompt": (False,),
        "continue_final_message": (False,),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "input_type": (),
        "messages": (),
        "normalize": (True,),
    }

    input: Inputs = Field(
        description=f"A text or token ids, or up to {MAX_INPUTS} of them. Token ids are taken as they are.",
        examples=["The capital of China is Beijing."],
    )
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: of fp32 numbers, little endian, as OpenAI's client asks for."
    )
    dimensions: int | None = Field(
        None,
        ge=1,
        le=2**20,
        description="Length of each embedding: the model's own, or a shorter one where the model allows it.",
    )
    add_special_tokens: bool = Field(True, description="Whether a text gets the tokens that the tokenizer adds.")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_TOKENS,
        description="How many tokens of a longer input are kept, those that the tokenizer adds among them; "
        "-1: as many as the context holds.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where a longer input is cut: `right`, the default, keeps its beginning."
    )


class ScoreRequest(PoolingRequest):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = _UNSUPPORTED | {
        "data_1": (),
        "data_2": (),
        "documents": (),
        "items": (),
        "max_tokens_per_doc": (0,),
        "max_tokens_per_query": (0,),
        "queries": (),
    }

    text_1: _TextOrTexts = Field(description="A query, or one for each text of `text_2`.", examples=["a query"])
    text_2: _TextOrTexts = Field(description=f"Documents, {MAX_INPUTS} at most.", examples=[["a document"]])
    instruction: _Instruction | None = Field(None, description="What makes a document relevant.")


class RerankRequest(PoolingRequest):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = _UNSUPPORTED | {
        "max_chunks_per_doc": (),
        "max_tokens_per_doc": (0,),
        "max_tokens_per_query": (0,),
        "rank_fields": (),
    }

    query: Text = Field(description="A query.", examples=["a query"])
    documents: _Texts = Field(description=f"Documents, {MAX_INPUTS} at most.", examples=[["one", "another"]])
    top_n: int | None = Field(None, ge=0, le=MAX_INPUTS, description="Results to give; 0 or null: all.")
    return_documents: bool = Field(True, description="Whether each result has its document's text.")
    instruction: _Instruction | None = Field(None, description="What makes a document relevant.")
