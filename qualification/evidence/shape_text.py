"""A shape read back from its one line, as a matrix file names it: the inverse of `str(shape)`."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kernels.collective.shape import parse_collective_shape
from kernels.convolution.shape import parse_convolution_shape
from kernels.experts.shape import parse_experts_shape
from kernels.linear.shape import parse_linear_shape
from kernels.recurrence.shape import parse_recurrence_shape
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.cache_dtype import cache_dtype_of
from kernels.vocabulary.operators import AnyShape, Operator
from kernels.vocabulary.recurrence_operator import CONVOLUTION, RECURRENCE
from kernels.vocabulary.shape import AttentionShape, Dtype, Mask, Phase
from kernels.vocabulary.value_shape import Indexer, Values, with_values

_SHAPE = re.compile(
    r"(?P<phase>\w+) (?P<dtype>\w+)(?:/kv-(?P<kv>\w+))? h(?P<heads>\d+):(?P<kv_heads>\d+) d(?P<head_dim>\d+)"
    r"(?:/(?P<values>latent|value)-(?P<value_dim>\d+)"
    r"(?:/top(?P<chosen>\d+)(?:-index(?P<index_heads>\d+)x(?P<index_dim>\d+))?)?)?"
    r" q-(?P<query>\w+) c-(?P<context>\w+) (?P<mask>\w+)"
    r"(?: page(?P<page>\d+))?(?: window(?P<window>\d+))?"
    r"(?: softcap(?P<softcap>[\d.e+-]+))?(?P<sinks> sinks)?"
)


# By the first word of the line. Attention's lines begin with the phase.
_PARSERS: Mapping[str, Callable[[str], AnyShape]] = MappingProxyType(
    {
        Operator.COLLECTIVE.value: parse_collective_shape,
        Operator.EXPERTS.value: parse_experts_shape,
        Operator.LINEAR.value: parse_linear_shape,
        RECURRENCE.value: parse_recurrence_shape,
        CONVOLUTION.value: parse_convolution_shape,
    }
)


def parse_shape(text: str) -> AnyShape:
    """Parse the line of a shape of any operator. Raises ValueError for text that `str` makes of no shape."""
    return _PARSERS.get(text.partition(" ")[0], parse_attention_shape)(text)


def parse_attention_shape(text: str) -> AttentionShape:
    """Parse the line of an attention shape. Raises ValueError for any other text."""
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no attention shape")
    field = found.groupdict()
    shape = AttentionShape(
        phase=Phase(field["phase"]),
        dtype=Dtype(field["dtype"]),
        kv_dtype=cache_dtype_of(field["kv"] or field["dtype"]),
        num_heads=int(field["heads"]),
        num_kv_heads=int(field["kv_heads"]),
        head_dim=int(field["head_dim"]),
        query_bucket=Bucket(field["query"]),
        context_bucket=Bucket(field["context"]),
        page_size=_number(field["page"]),
        window=_number(field["window"]),
        softcap=None if field["softcap"] is None else float(field["softcap"]),
        sinks=field["sinks"] is not None,
        mask=Mask(field["mask"]),
    )
    if field["values"] is not None:
        indexer = None
        if field["chosen"] is not None:
            sizes = (int(field[name] or 0) for name in ("chosen", "index_heads", "index_dim"))
            indexer = Indexer(*sizes)
        shape = with_values(shape, Values(int(field["value_dim"]), field["values"] == "latent", indexer))
    if str(shape) != text:
        raise ValueError(f"{text!r} is no attention shape as {shape} is written")
    return shape


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
