"""The towers of Qwen 2, 2.5, 3 and 3.5, from config.json."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from kernels.fused.activation_kind import Activation
from qualification.model.families.tower_family import AXIAL_THETA, TowerFamily, TowerSource, check_keys
from qualification.model.fields import Fields
from qualification.model.tower import TowerActivation, TowerConfig, TowerNames

_KEYS = (
    "depth hidden_size hidden_act intermediate_size num_heads in_channels in_chans patch_size spatial_merge_size "
    "temporal_patch_size out_hidden_size rope_parameters"
)
_OF_QWEN_2 = (
    "depth embed_dim hidden_size hidden_act mlp_ratio num_heads in_channels in_chans patch_size spatial_merge_size "
    "temporal_patch_size rope_parameters"
)
_OF_QWEN_2_5 = "window_size fullatt_block_indexes"
_OF_QWEN_3 = "num_position_embeddings deepstack_visual_indexes"
_QWEN_3_NAMES = TowerNames(
    parts=("visual.",),
    patches="visual.patch_embed.proj",
    positions="visual.pos_embed.weight",
    layer="visual.blocks.{}",
    attention_norm="norm1",
    qkv=("attn.qkv",),
    output="attn.proj",
    feed_forward_norm="norm2",
    up=("mlp.linear_fc1",),
    down="mlp.linear_fc2",
    merger="visual.merger",
    deepstack="visual.deepstack_merger_list.{}",
    merger_norm="norm",
    first="linear_fc1",
    second="linear_fc2",
)
QWEN_2_5_NAMES = replace(
    _QWEN_3_NAMES,
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    merger_norm="ln_q",
    first="mlp.0",
    second="mlp.2",
)
_QWEN_2_NAMES = replace(QWEN_2_5_NAMES, up=("mlp.fc1",), down="mlp.fc2")


def _read_qwen_2(source: TowerSource) -> TowerConfig:
    """Read that of Qwen 2: every layer sees the whole image, and `hidden_size` is the text's."""
    fields = source.vision.or_else(embed_dim=1280)
    check_keys(fields, _OF_QWEN_2)
    size, text_size = fields.integer("embed_dim"), source.text.hidden_size
    if fields.integer("hidden_size", 3584) != text_size:
        fields.refuse("hidden_size", f"{text_size}, the hidden_size of the text")
    width = size * fields.integer("mlp_ratio", 4)
    common = _common(fields, TowerActivation.QUICK_GELU, depth=32, patch_size=14, width=width, size_name="embed_dim")
    return replace(common, names=_QWEN_2_NAMES, has_patch_bias=False, out_size=text_size)


def _read_qwen_2_5(source: TowerSource) -> TowerConfig:
    fields = source.vision
    check_keys(fields, f"{_KEYS} {_OF_QWEN_2_5}")
    common, depth = _common(fields, Activation.SILU, depth=32, patch_size=14, width=3420), fields.integer("depth", 32)
    side = common.patch_size * common.merge
    window = fields.integer("window_size", 112)
    if window % side:
        fields.refuse("window_size", f"a multiple of {side} pixels, those of a token")
    full = fields.given("fullatt_block_indexes")
    full_layers = frozenset({7, 15, 23, 31}) if full is None else fields.indices("fullatt_block_indexes", depth)
    return replace(
        common,
        names=QWEN_2_5_NAMES,
        is_gated=True,
        has_rms_norms=True,
        has_patch_bias=False,
        window=window // side,
        full_layers=full_layers,
    )


def _read_qwen_3_5(source: TowerSource) -> TowerConfig:
    """Read that of Qwen 3.5: Qwen 3's without deepstack."""
    if source.vision.given("deepstack_visual_indexes") not in (None, []):
        source.vision.refuse("deepstack_visual_indexes", "absent or empty in this family")
    return replace(_read_qwen_3(source), deepstack=())


def _read_qwen_3(source: TowerSource) -> TowerConfig:
    fields = source.vision
    check_keys(fields, f"{_KEYS} {_OF_QWEN_3}")
    common = _common(fields, Activation.GELU_TANH, depth=27, patch_size=16, width=4304)
    count = fields.integer("num_position_embeddings", 2304)
    side = round(count**0.5)
    if side**2 != count or side < 2:
        fields.refuse("num_position_embeddings", "the square of an integer from 2 on")
    deepstack: tuple[int, ...] = (8, 16, 24)
    if fields.has("deepstack_visual_indexes"):
        deepstack = tuple(sorted(fields.indices("deepstack_visual_indexes", common.num_layers)))
        if list(deepstack) != fields.given("deepstack_visual_indexes"):
            fields.refuse("deepstack_visual_indexes", "in order, each layer once")
    return replace(common, num_positions=side, deepstack=deepstack)


def _common(
    fields: Fields,
    activation: Activation | TowerActivation,
    *,
    depth: int,
    patch_size: int,
    width: int,
    size_name: str = "hidden_size",
) -> TowerConfig:
    """Return what the towers of Qwen have in common, with what their classes have where a field is missing.

    size_name   the field of a patch's numbers
    """
    sides = fields.integers("patch_size", 2, patch_size)
    frames = fields.integers("temporal_patch_size", 1, 2)
    if sides[0] != sides[1]:
        fields.refuse("patch_size", "one size of both sides")
    for name in ("in_channels", "in_chans"):
        if fields.integer(name, 3) != 3:
            fields.refuse(name, "3, red, green and blue")
    hidden, heads = fields.integer(size_name), fields.integer("num_heads", 16)
    if hidden % heads or hidden // heads % 4:
        fields.refuse("num_heads", f"a divisor of {size_name} ({hidden}) with heads of a multiple of 4 numbers")
    fields.choice("hidden_act", (activation.value,), activation.value)
    rope = fields.section("rope_parameters") or Fields({}, fields.source)
    rope.choice("rope_type", ("axial", "default"), "axial")
    return TowerConfig(
        num_layers=fields.integer("depth", depth),
        hidden_size=hidden,
        num_heads=heads,
        width=fields.integer("intermediate_size", width),
        activation=activation,
        is_gated=False,
        patch_size=sides[0],
        num_frames=frames[0],
        merge=fields.integer("spatial_merge_size", 2),
        out_size=fields.integer("out_hidden_size", 3584),
        names=_QWEN_3_NAMES,
        rope_theta=rope.number("rope_theta", AXIAL_THETA),
    )


def in_sections(rope: Fields, num_pairs: int, *, missing: tuple[int, int, int] = (16, 24, 24)) -> tuple[int, ...]:
    """Qwen 2.5: the first pairs by time, then those by height, then those by width."""
    sections = _sections(rope, missing)
    if sum(sections) != num_pairs:
        rope.refuse("mrope_section", f"numbers that sum up to {num_pairs}, the pairs of a head's dimensions")
    return tuple(part for part, count in enumerate(sections) for _ in range(count))


def _interleaved(rope: Fields, num_pairs: int, *, missing: tuple[int, int, int] = (24, 20, 20)) -> tuple[int, ...]:
    """Qwen 3: time, height and width in turns, as long as the two have pairs left; then time."""
    _, height, width = _sections(rope, missing)
    limits = {1: 3 * height, 2: 3 * width}
    return tuple(pair % 3 if pair < limits.get(pair % 3, 0) else 0 for pair in range(num_pairs))


def _sections(rope: Fields, missing: tuple[int, int, int]) -> tuple[int, ...]:
    if not rope.has("mrope_section"):
        return missing
    found = rope.given("mrope_section")
    if not isinstance(found, list) or len(found) != 3 or not all(type(it) is int and it >= 0 for it in found):
        rope.refuse("mrope_section", "a list of 3 integers from 0 on")
    return tuple(found)


_QWEN_3 = TowerFamily(_QWEN_3_NAMES, _read_qwen_3, _interleaved)
_QWEN_3_5 = TowerFamily(_QWEN_3_NAMES, _read_qwen_3_5, partial(_interleaved, missing=(11, 11, 10)))
QWEN_TOWERS: Mapping[str, TowerFamily] = {
    "qwen2_vl": TowerFamily(_QWEN_2_NAMES, _read_qwen_2, in_sections),
    "qwen2_5_vl": TowerFamily(QWEN_2_5_NAMES, _read_qwen_2_5, in_sections),
    "qwen3_vl": _QWEN_3,
    "qwen3_vl_moe": _QWEN_3,
    "qwen3_5": _QWEN_3_5,
    "qwen3_5_moe": _QWEN_3_5,
}
