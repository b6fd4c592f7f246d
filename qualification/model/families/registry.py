"""Every model family there is. A new one is a file beside this one and a line here."""

from collections.abc import Mapping
from difflib import get_close_matches

from qualification.model.families.afmoe import AFMOE
from qualification.model.families.apertus import APERTUS
from qualification.model.families.arcee import ARCEE
from qualification.model.families.bailing_hybrid import BAILING_HYBRID
from qualification.model.families.bailing_moe_v2 import BAILING_MOE, BAILING_MOE_V2
from qualification.model.families.bamba import BAMBA
from qualification.model.families.cohere import COHERE
from qualification.model.families.cohere2 import COHERE2
from qualification.model.families.cohere2_moe import COHERE2_MOE
from qualification.model.families.cwm import CWM
from qualification.model.families.deepseek_ocr import DEEPSEEK_OCR2_TEXT
from qualification.model.families.deepseek_v2 import DEEPSEEK_V2
from qualification.model.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from qualification.model.families.deepseek_v32 import DEEPSEEK_V32
from qualification.model.families.dots1 import DOTS1
from qualification.model.families.ernie4_5 import ERNIE4_5
from qualification.model.families.ernie4_5_moe import ERNIE4_5_MOE
from qualification.model.families.ernie4_5_vl_moe import ERNIE4_5_VL_MOE_TEXT
from qualification.model.families.exaone4 import EXAONE4
from qualification.model.families.exaone_moe import EXAONE_MOE
from qualification.model.families.falcon_h1 import FALCON_H1
from qualification.model.families.family import Family
from qualification.model.families.flex_olmo import FLEX_OLMO
from qualification.model.families.gemma import GEMMA
from qualification.model.families.gemma2 import GEMMA2
from qualification.model.families.gemma3 import GEMMA3
from qualification.model.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from qualification.model.families.glm import GLM
from qualification.model.families.glm4 import GLM4
from qualification.model.families.glm4_moe import GLM4_MOE
from qualification.model.families.glm4_moe_lite import GLM4_MOE_LITE
from qualification.model.families.glm4v import GLM4V_TEXT
from qualification.model.families.glm4v_moe import GLM4V_MOE_TEXT
from qualification.model.families.glm_moe_dsa import GLM_MOE_DSA
from qualification.model.families.glm_ocr import GLM_OCR_TEXT
from qualification.model.families.gpt2 import GPT2
from qualification.model.families.gpt_bigcode import GPT_BIGCODE
from qualification.model.families.gpt_neox import GPT_NEOX
from qualification.model.families.gpt_oss import GPT_OSS
from qualification.model.families.granite import GRANITE
from qualification.model.families.granite_swa import GRANITE_SWA, GRANITEMOE_SWA
from qualification.model.families.granitemoe import GRANITEMOE, GRANITEMOESHARED
from qualification.model.families.granitemoehybrid import GRANITEMOEHYBRID
from qualification.model.families.helium import HELIUM
from qualification.model.families.hunyuan_v1_dense import HUNYUAN_V1_DENSE, HUNYUAN_VL_TEXT
from qualification.model.families.hunyuan_v1_moe import HUNYUAN_V1_MOE
from qualification.model.families.hy_v3 import HY_V3
from qualification.model.families.image_models import IMAGE_MODELS
from qualification.model.families.internlm2 import INTERNLM2
from qualification.model.families.internlm3 import INTERNLM3
from qualification.model.families.jais2 import JAIS2
from qualification.model.families.kimi_linear import KIMI_LINEAR
from qualification.model.families.laguna import LAGUNA
from qualification.model.families.lfm2 import LFM2, LFM2_MOE
from qualification.model.families.llama import LLAMA
from qualification.model.families.llama4 import LLAMA4_TEXT
from qualification.model.families.mellum import MELLUM
from qualification.model.families.mimo_v2 import MIMO_V2, MIMO_V2_FLASH
from qualification.model.families.minicpm import MINICPM
from qualification.model.families.minicpm3 import MINICPM3
from qualification.model.families.minimax_m2 import MINIMAX_M2
from qualification.model.families.ministral import MINISTRAL
from qualification.model.families.ministral3 import MINISTRAL3
from qualification.model.families.mistral import MISTRAL
from qualification.model.families.mistral4 import MISTRAL4
from qualification.model.families.mixtral import MIXTRAL
from qualification.model.families.muse_glimmer import MUSE_GLIMMER_TEXT
from qualification.model.families.nemotron import NEMOTRON
from qualification.model.families.nemotron_h import NEMOTRON_H
from qualification.model.families.nemotron_nas import NEMOTRON_NAS
from qualification.model.families.olmo import OLMO
from qualification.model.families.olmo2 import OLMO2
from qualification.model.families.olmo3 import OLMO3
from qualification.model.families.olmoe import OLMOE
from qualification.model.families.opt import OPT
from qualification.model.families.paddleocr_vl import PADDLEOCR_VL_TEXT
from qualification.model.families.phi import PHI
from qualification.model.families.phi3 import PHI3
from qualification.model.families.phimoe import PHIMOE
from qualification.model.families.qwen2 import QWEN2
from qualification.model.families.qwen2_5_vl import QWEN2_5_VL, QWEN2_5_VL_TEXT, QWEN2_VL_TEXT
from qualification.model.families.qwen2_moe import QWEN2_MOE
from qualification.model.families.qwen3 import QWEN3
from qualification.model.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from qualification.model.families.qwen3_moe import QWEN3_MOE
from qualification.model.families.qwen3_next import QWEN3_NEXT
from qualification.model.families.qwen3_vl import QWEN3_VL_TEXT
from qualification.model.families.qwen3_vl_moe import QWEN3_VL_MOE_TEXT
from qualification.model.families.seed_oss import SEED_OSS
from qualification.model.families.smollm3 import SMOLLM3
from qualification.model.families.solar_open import SOLAR_OPEN
from qualification.model.families.stablelm import STABLELM
from qualification.model.families.starcoder2 import STARCODER2
from qualification.model.families.step3p5 import STEP3P5
from qualification.model.families.youtu import YOUTU
from qualification.model.fields import ModelConfigError

KNOWN: tuple[Family, ...] = (
    AFMOE,
    APERTUS,
    ARCEE,
    BAILING_HYBRID,
    BAILING_MOE,
    BAILING_MOE_V2,
    BAMBA,
    COHERE,
    COHERE2,
    COHERE2_MOE,
    CWM,
    DEEPSEEK_OCR2_TEXT,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    DOTS1,
    ERNIE4_5,
    ERNIE4_5_MOE,
    ERNIE4_5_VL_MOE_TEXT,
    EXAONE4,
    EXAONE_MOE,
    FALCON_H1,
    FLEX_OLMO,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GEMMA4_UNIFIED,
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GLM4V_MOE_TEXT,
    GLM4V_TEXT,
    GLM_MOE_DSA,
    GLM_OCR_TEXT,
    GPT2,
    GPT_BIGCODE,
    GPT_NEOX,
    GPT_OSS,
    GRANITE,
    GRANITE_SWA,
    GRANITEMOE,
    GRANITEMOEHYBRID,
    GRANITEMOESHARED,
    GRANITEMOE_SWA,
    HELIUM,
    HUNYUAN_V1_DENSE,
    HUNYUAN_V1_MOE,
    HUNYUAN_VL_TEXT,
    HY_V3,
    INTERNLM2,
    INTERNLM3,
    JAIS2,
    KIMI_K2,
    KIMI_LINEAR,
    LAGUNA,
    LFM2,
    LFM2_MOE,
    LLAMA,
    LLAMA4_TEXT,
    MELLUM,
    MIMO_V2,
    MIMO_V2_FLASH,
    MINICPM,
    MINICPM3,
    MINIMAX_M2,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    MISTRAL4,
    MIXTRAL,
    MUSE_GLIMMER_TEXT,
    NEMOTRON,
    NEMOTRON_H,
    NEMOTRON_NAS,
    OLMO,
    OLMO2,
    OLMO3,
    OLMOE,
    OPT,
    PADDLEOCR_VL_TEXT,
    PHI,
    PHI3,
    PHIMOE,
    QWEN2,
    QWEN2_5_VL,
    QWEN2_5_VL_TEXT,
    QWEN2_MOE,
    QWEN2_VL_TEXT,
    QWEN3,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_VL_TEXT,
    QWEN3_VL_MOE_TEXT,
    SEED_OSS,
    SMOLLM3,
    SOLAR_OPEN,
    STABLELM,
    STARCODER2,
    STEP3P5,
    YOUTU,
)
_NUM_NEAREST = 3  # families that a refusal names
_ALL = "`hallmark models` lists all"
_CUTOFF = 0.7  # of difflib: qwen4 is near qwen3, mamba near nothing
FAMILIES = tuple(family for family in KNOWN if family.tensors is not None)  # those that the server serves

# Known model_types that no kernel can compute, and what each asks for.
_LACKING: Mapping[object, str] = {
    **dict.fromkeys(
        ("unlimited-ocr", "unlimited_ocr"),
        "an answer's tokens see its prompt and 128 of their neighbours, by a mask that no path computes",
    ),
    "pixtral": "its files are in Mistral's own format, which is not read: serve the same model in Hugging Face's, "
    "whose model_type is llava",
    **dict.fromkeys(
        ("mamba", "falcon_mamba", "jamba"),
        "its state space decays each channel by a vector of its own (Mamba 1), which no kernel computes",
    ),
    "mamba2": "no layer of it attends, and prompts are cached by the pages of such layers",
    **dict.fromkeys(("zamba", "zamba2"), "its layers share blocks of attention, which no reader takes"),
    **dict.fromkeys(
        ("gemma3n", "gemma3n_text"), "its residual is four predicted copies (AltUp), which no reader takes"
    ),
    **dict.fromkeys(
        ("minimax", "minimax_text_01", "minimax_m1"),
        "its residual is what each norm has made (DeepNorm), which no reader takes",
    ),
    "minimax_m3_vl": "its attention reads blocks of keys that an indexer chooses, which no path computes",
}


# Classes that no reader takes though their model_type is a family's, and what each asks for.
_LING_3 = (
    "Ling 3.0's, whose decays are bounded and of each channel, and whose attention is gated, which no reader takes"
)
_LACKING_CLASSES: Mapping[object, str] = {"BailingHybridForCausalLM": _LING_3, "BailingMoeV3ForCausalLM": _LING_3}


def reason_of_class(architectures: list[object]) -> str:
    """Return what a class asks for that no reader has, behind a semicolon; "" where that is not known."""
    known = next((it for name, it in _LACKING_CLASSES.items() if name in architectures), None)
    return "" if known is None else f"; that class is {known}"


def family_named(
    model_type: object, source: str, families: tuple[Family, ...] = FAMILIES, *, architectures: object = None
) -> Family:
    """The family of config.json's model_type. Raises ModelConfigError that names the nearest of `families`.

    architectures  as in config.json, for the message alone
    """
    for family in families:
        if family.model_type == model_type:
            return family
    raise ModelConfigError(
        f"{source}: model_type {model_type!r}{_in_brackets(architectures)} is not supported{reason_of(model_type)}; "
        f"{nearest(model_type, architectures, families)}"
    )


def reason_of(model_type: object) -> str:
    """Return what a model_type asks for that no kernel or reader has, behind a colon; "" where that is not known."""
    known = _LACKING.get(model_type) if isinstance(model_type, str) else None
    return "" if known is None else f": {known}"


def nearest(model_type: object, architectures: object, families: tuple[Family, ...] = FAMILIES) -> str:
    """Return the clause of a refusal that names what of these families is spelt most like a model_type or class."""
    classes = {it.model_type: it.architectures[0] for it in families if it.architectures}
    classes |= {it.model_type: it.architectures[0] for it in IMAGE_MODELS}
    given = [model_type, *(architectures if isinstance(architectures, list) else [])]
    types = {_stem(name): model_type for model_type, name in classes.items()} | {name: name for name in classes}
    stems = [_stem(name) for name in given if isinstance(name, str)]
    found = [match for stem in stems for match in get_close_matches(stem, types, n=_NUM_NEAREST, cutoff=_CUTOFF)]
    near = list(dict.fromkeys(types[match] for match in found))[:_NUM_NEAREST]
    named = ", ".join(f"{model_type} ({classes[model_type]})" for model_type in near)
    return f"nearest: {named}; {_ALL}" if near else _ALL


def _stem(name: str) -> str:
    """Return what tells a class or model_type from others: qwen3moe of Qwen3MoeForCausalLM."""
    return name.partition("For")[0].removesuffix("_text").lower()


def _in_brackets(architectures: object) -> str:
    names = architectures if isinstance(architectures, list) else []
    return f" ({', '.join(map(str, names))})" if names else ""
