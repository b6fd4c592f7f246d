"""Published models of the classes that are served: the few facts of each that neither its class nor a preset says.

A test holds the list to the families: each has a model here or is named as without, and each model's class is served.
"""

from dataclasses import dataclass
from enum import Enum

from server.settings import ToolCallParser as Calls


class Stored(Enum):
    """Format of most of the weights in the repository of that name."""

    BF16 = "bf16"
    FP8 = "fp8"
    MXFP4 = "mxfp4"  # 4 bits
    INT4 = "int4"


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one stream, by a file of docs/benchmarks.

    first_token_ms  to the first token of a prompt of 2,048
    token_ms        of each further token
    """

    gpu: str
    file: str
    first_token_ms: float
    token_ms: float


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model on the hub.

    architecture  its class, as in config.json
    billions      parameters; of a model that also sees images, of its text part
    calls         the format in which it calls tools; None: its template has no place for tools, or shows no calls
    preset        of the same shapes
    gigabytes     of weights in less than 16 bits; else None
    """

    name: str
    architecture: str
    billions: float
    calls: Calls | None = None
    preset: str | None = None
    stored: Stored = Stored.BF16
    gigabytes: float | None = None
    measured: tuple[Measured, ...] = ()


_8B_TIMES = (
    Measured("H200", "serve-llama8b.json", 47.9, 3.84),
    Measured("H100", "serve-llama8b-nvidia-h100.json", 50.1, 5.26),
)
PUBLISHED: tuple[PublishedModel, ...] = (
    PublishedModel(
        "meta-llama/Llama-3.1-8B-Instruct", "LlamaForCausalLM", 8.03, Calls.LLAMA3_JSON, "llama-3.1-8b",
        measured=_8B_TIMES,
    ),
    PublishedModel("meta-llama/Llama-3.2-1B-Instruct", "LlamaForCausalLM", 1.24, Calls.LLAMA3_JSON, "llama-3.2-1b"),
    PublishedModel("meta-llama/Llama-3.3-70B-Instruct", "LlamaForCausalLM", 70.6, Calls.LLAMA3_JSON),
    PublishedModel(
        "meta-llama/Llama-4-Scout-17B-16E-Instruct", "Llama4ForConditionalGeneration", 107.8, Calls.PYTHONIC
    ),
    PublishedModel("Qwen/Qwen2.5-7B-Instruct", "Qwen2ForCausalLM", 7.62, Calls.HERMES, "qwen2.5-7b"),
    PublishedModel("Qwen/Qwen2.5-32B-Instruct", "Qwen2ForCausalLM", 32.8, Calls.HERMES),
    PublishedModel("Qwen/Qwen2.5-72B-Instruct", "Qwen2ForCausalLM", 72.7, Calls.HERMES),
    PublishedModel("Qwen/Qwen2-VL-7B-Instruct", "Qwen2VLForConditionalGeneration", 7.62),
    PublishedModel("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2_5_VLForConditionalGeneration", 7.62, None, "qwen2.5-vl-7b"),
    PublishedModel("Qwen/Qwen2-57B-A14B-Instruct", "Qwen2MoeForCausalLM", 57.4),
    PublishedModel(
        "Qwen/Qwen3-0.6B", "Qwen3ForCausalLM", 0.6, Calls.HERMES, "qwen3-0.6b",
        measured=(Measured("H200", "serve-qwen06b.json", 6.35, 0.67),),
    ),
    PublishedModel("Qwen/Qwen3-8B", "Qwen3ForCausalLM", 8.19, Calls.HERMES, "qwen3-8b"),
    PublishedModel("Qwen/Qwen3-32B", "Qwen3ForCausalLM", 32.8, Calls.HERMES),
    PublishedModel(
        "Qwen/Qwen3-30B-A3B", "Qwen3MoeForCausalLM", 30.5, Calls.HERMES, "qwen3-30b-a3b",
        measured=(Measured("H200", "serve-qwen3-30b-a3b.json", 49.4, 2.53),),
    ),
    PublishedModel("Qwen/Qwen3-Coder-30B-A3B-Instruct", "Qwen3MoeForCausalLM", 30.5, Calls.QWEN3_CODER),
    PublishedModel("Qwen/Qwen3-235B-A22B-Instruct-2507", "Qwen3MoeForCausalLM", 235.1, Calls.HERMES),
    PublishedModel("Qwen/Qwen3-VL-8B-Instruct", "Qwen3VLForConditionalGeneration", 8.19, Calls.HERMES),
    PublishedModel("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen3VLMoeForConditionalGeneration", 30.5, Calls.HERMES),
    PublishedModel(
        "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3NextForCausalLM", 79.7, Calls.HERMES, "qwen3-next-80b-a3b"
    ),
    PublishedModel("Qwen/Qwen3.5-9B", "Qwen3_5ForConditionalGeneration", 8.95, Calls.QWEN3_CODER, "qwen3.5-9b"),
    PublishedModel("Qwen/Qwen3.6-27B", "Qwen3_5ForConditionalGeneration", 26.9, Calls.QWEN3_CODER, "qwen3.5-27b"),
    PublishedModel(
        "Qwen/Qwen3.6-35B-A3B", "Qwen3_5MoeForConditionalGeneration", 34.7, Calls.QWEN3_CODER, "qwen3.5-35b-a3b"
    ),
    PublishedModel(
        "openai/gpt-oss-20b", "GptOssForCausalLM", 20.9, Calls.HARMONY, "gpt-oss-20b", Stored.MXFP4, 13.8,
        measured=(Measured("H200", "serve-gpt-oss-20b-nvidia-h200.json", 33.8, 1.81),),
    ),
    PublishedModel("openai/gpt-oss-120b", "GptOssForCausalLM", 116.8, Calls.HARMONY, None, Stored.MXFP4, 65.2),
    PublishedModel("google/gemma-7b", "GemmaForCausalLM", 8.54),
    PublishedModel("google/gemma-2-9b-it", "Gemma2ForCausalLM", 9.24, None, "gemma-2-9b"),
    PublishedModel("google/gemma-2-27b-it", "Gemma2ForCausalLM", 27.2),
    PublishedModel("google/gemma-3-1b-it", "Gemma3ForCausalLM", 1.0, None, "gemma-3-1b"),
    PublishedModel("google/gemma-3-4b-it", "Gemma3ForConditionalGeneration", 3.88, None, "gemma-3-4b"),
    PublishedModel("google/gemma-3-27b-it", "Gemma3ForConditionalGeneration", 27.0),
    PublishedModel("google/gemma-4-31B-it", "Gemma4ForConditionalGeneration", 30.7, Calls.GEMMA, "gemma-4-31b"),
    PublishedModel("google/gemma-4-26B-A4B-it", "Gemma4ForConditionalGeneration", 25.2, Calls.GEMMA, "gemma-4-26b-a4b"),
    PublishedModel("google/gemma-4-12B-it", "Gemma4UnifiedForConditionalGeneration", 12.0, Calls.GEMMA),
    PublishedModel("google/gemma-4-E4B-it", "Gemma4ForConditionalGeneration", 7.5, Calls.GEMMA, "gemma-4-e4b"),
    PublishedModel("google/gemma-4-E2B-it", "Gemma4ForConditionalGeneration", 4.6, Calls.GEMMA),
    PublishedModel("mistralai/Mistral-7B-v0.1", "MistralForCausalLM", 7.24, None, "mistral-7b-v0.1"),
    PublishedModel("mistralai/Mistral-7B-Instruct-v0.3", "MistralForCausalLM", 7.25, Calls.MISTRAL),
    PublishedModel(
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "Mistral3ForConditionalGeneration", 23.6, Calls.MISTRAL
    ),
    PublishedModel("mistralai/Ministral-3-8B-Base-2512", "Mistral3ForConditionalGeneration", 8.49),
    PublishedModel("mistralai/Mixtral-8x7B-v0.1", "MixtralForCausalLM", 46.7, None, "mixtral-8x7b"),
    PublishedModel("microsoft/Phi-3-mini-4k-instruct", "Phi3ForCausalLM", 3.82, None, "phi-3-mini"),
    PublishedModel("microsoft/Phi-3.5-mini-instruct", "Phi3ForCausalLM", 3.82, None, "phi-3.5-mini"),
    PublishedModel("microsoft/Phi-4-mini-instruct", "Phi3ForCausalLM", 3.84, Calls.PHI4_MINI),
    PublishedModel("microsoft/phi-4", "Phi3ForCausalLM", 14.7),
    PublishedModel("zai-org/glm-4-9b-hf", "GlmForCausalLM", 9.4),
    PublishedModel("zai-org/GLM-4-32B-0414", "Glm4ForCausalLM", 32.6),
    PublishedModel("zai-org/GLM-4.5-Air", "Glm4MoeForCausalLM", 106.9, Calls.GLM45, "glm-4.5-air"),
    PublishedModel("zai-org/GLM-4.7", "Glm4MoeForCausalLM", 352.8, Calls.GLM47),
    PublishedModel("zai-org/GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", 29.9, Calls.GLM47, "glm-4.7-flash"),
    PublishedModel("zai-org/GLM-5", "GlmMoeDsaForCausalLM", 743.9, Calls.GLM47),
    PublishedModel("zai-org/GLM-4.5V", "Glm4vMoeForConditionalGeneration", 106.9, Calls.GLM45),
    PublishedModel("zai-org/GLM-4.6V", "Glm4vMoeForConditionalGeneration", 106.9, Calls.GLM45),
    PublishedModel("zai-org/GLM-4.1V-9B-Thinking", "Glm4vForConditionalGeneration", 9.4, None, "glm-4.1v-9b"),
    PublishedModel("ibm-granite/granite-3.3-8b-instruct", "GraniteForCausalLM", 8.17, Calls.GRANITE, "granite-3.3-8b"),
    PublishedModel("ibm-granite/granite-3.1-3b-a800m-instruct", "GraniteMoeForCausalLM", 3.3, Calls.GRANITE),
    PublishedModel("ibm-granite/granite-4.0-h-small", "GraniteMoeHybridForCausalLM", 32.2, Calls.HERMES),
    PublishedModel("ibm-granite/granite-4.0-h-tiny", "GraniteMoeHybridForCausalLM", 7.0, Calls.HERMES),
    PublishedModel("ibm-granite/granite-4.0-micro", "GraniteMoeHybridForCausalLM", 3.4, Calls.HERMES),
    PublishedModel("ibm-granite/granite-swash-2b", "GraniteSWAForCausalLM", 2.14),
    PublishedModel("ibm-research/moe-7b-1b-active-shared-experts", "GraniteMoeSharedForCausalLM", 7.0),
    PublishedModel("CohereLabs/c4ai-command-r-08-2024", "CohereForCausalLM", 32.3),
    PublishedModel("CohereLabs/aya-expanse-8b", "CohereForCausalLM", 8.03),
    PublishedModel("CohereLabs/c4ai-command-r7b-12-2024", "Cohere2ForCausalLM", 8.03, Calls.COHERE3),
    PublishedModel("CohereLabs/c4ai-command-a-03-2025", "Cohere2ForCausalLM", 111.1, Calls.COHERE3),
    PublishedModel("CohereLabs/North-Mini-Code-1.0", "Cohere2MoeForCausalLM", 30.5, Calls.COHERE4),
    PublishedModel("allenai/OLMo-7B-hf", "OlmoForCausalLM", 6.89),
    PublishedModel("allenai/OLMo-1B-hf", "OlmoForCausalLM", 1.18),
    PublishedModel("allenai/OLMo-2-1124-7B", "Olmo2ForCausalLM", 7.3, None, "olmo-2-7b"),
    PublishedModel("allenai/Olmo-3-7B-Instruct", "Olmo3ForCausalLM", 7.3, Calls.OLMO3),
    PublishedModel("allenai/OLMoE-1B-7B-0924-Instruct", "OlmoeForCausalLM", 6.92),
    PublishedModel("allenai/FlexOlmo-7x7B-1T", "FlexOlmoForCausalLM", 33.3),
    PublishedModel("ByteDance-Seed/Seed-OSS-36B-Instruct", "SeedOssForCausalLM", 36.2, Calls.SEED_OSS),
    PublishedModel("HuggingFaceTB/SmolLM3-3B", "SmolLM3ForCausalLM", 3.08, Calls.HERMES),
    PublishedModel("LGAI-EXAONE/EXAONE-4.0-32B", "Exaone4ForCausalLM", 32.0, Calls.HERMES),
    PublishedModel("LGAI-EXAONE/K-EXAONE-236B-A23B", "ExaoneMoeForCausalLM", 236.0, Calls.HERMES),
    PublishedModel("facebook/cwm", "CwmForCausalLM", 32.6),
    PublishedModel("rednote-hilab/dots.llm1.inst", "Dots1ForCausalLM", 142.8),
    PublishedModel("upstage/Solar-Open-100B", "SolarOpenForCausalLM", 102.6),
    PublishedModel("kyutai/helium-1-preview-2b", "HeliumForCausalLM", 2.17),
    PublishedModel("arcee-ai/AFM-4.5B", "ArceeForCausalLM", 4.62),
    PublishedModel("stabilityai/stablelm-3b-4e1t", "StableLmForCausalLM", 2.8),
    PublishedModel("stabilityai/stablelm-2-zephyr-1_6b", "StableLmForCausalLM", 1.64),
    PublishedModel("nvidia/Nemotron-Mini-4B-Instruct", "NemotronForCausalLM", 4.19),
    PublishedModel("nvidia/Minitron-8B-Base", "NemotronForCausalLM", 8.27),
    PublishedModel("inceptionai/Jais-2-8B-Chat", "Jais2ForCausalLM", 8.09),
    PublishedModel("bigcode/starcoder2-3b", "Starcoder2ForCausalLM", 3.03),
    PublishedModel("bigcode/starcoder2-15b", "Starcoder2ForCausalLM", 15.96),
    PublishedModel("microsoft/Phi-3.5-MoE-instruct", "PhimoeForCausalLM", 41.9),
    PublishedModel("microsoft/phi-2", "PhiForCausalLM", 2.78),
    PublishedModel("microsoft/phi-1_5", "PhiForCausalLM", 1.42),
    PublishedModel("openai-community/gpt2", "GPT2LMHeadModel", 0.124),
    PublishedModel("openai-community/gpt2-xl", "GPT2LMHeadModel", 1.56),
    PublishedModel("swiss-ai/Apertus-8B-Instruct-2509", "ApertusForCausalLM", 8.05),
    PublishedModel("swiss-ai/Apertus-70B-Instruct-2509", "ApertusForCausalLM", 70.6),
    PublishedModel("bigcode/starcoderbase-1b", "GPTBigCodeForCausalLM", 1.14),
    PublishedModel("bigcode/starcoder", "GPTBigCodeForCausalLM", 15.5),
    PublishedModel("EleutherAI/pythia-160m", "GPTNeoXForCausalLM", 0.162),
    PublishedModel("EleutherAI/pythia-6.9b", "GPTNeoXForCausalLM", 6.86),
    PublishedModel("EleutherAI/gpt-neox-20b", "GPTNeoXForCausalLM", 20.6),
    PublishedModel("tencent/Youtu-LLM-2B", "YoutuForCausalLM", 1.96, Calls.HERMES),
    PublishedModel("internlm/internlm2_5-7b-chat", "InternLM2ForCausalLM", 7.74),
    PublishedModel("internlm/internlm2_5-20b-chat", "InternLM2ForCausalLM", 19.86),
    PublishedModel("internlm/internlm3-8b-instruct", "InternLM3ForCausalLM", 8.8),
    PublishedModel("openbmb/MiniCPM-2B-sft-bf16", "MiniCPMForCausalLM", 2.72),
    PublishedModel("openbmb/MiniCPM4-8B", "MiniCPMForCausalLM", 8.19),
    PublishedModel("openbmb/MiniCPM3-4B", "MiniCPM3ForCausalLM", 4.07),
    PublishedModel("baidu/ERNIE-4.5-0.3B-PT", "Ernie4_5ForCausalLM", 0.36),
    PublishedModel("baidu/ERNIE-4.5-21B-A3B-PT", "Ernie4_5_MoeForCausalLM", 21.8),
    PublishedModel("baidu/ERNIE-4.5-VL-28B-A3B-PT", "Ernie4_5_VLMoeForConditionalGeneration", 21.8),
    PublishedModel("deepseek-ai/DeepSeek-V2-Lite-Chat", "DeepseekV2ForCausalLM", 15.7),
    PublishedModel("deepseek-ai/DeepSeek-OCR", "DeepseekOCRForCausalLM", 2.9),
    PublishedModel("deepseek-ai/DeepSeek-OCR-2", "DeepseekOCR2ForCausalLM", 2.9),
    PublishedModel("deepseek-community/DeepSeek-OCR-2", "DeepseekOcr2ForConditionalGeneration", 2.9),
    PublishedModel(
        "deepseek-ai/DeepSeek-V3", "DeepseekV3ForCausalLM", 671.0, Calls.DEEPSEEK_V3, stored=Stored.FP8
    ),
    PublishedModel("deepseek-ai/DeepSeek-V3.2", "DeepseekV32ForCausalLM", 671.9, Calls.DEEPSEEK_V32, stored=Stored.FP8),
    PublishedModel(
        "moonshotai/Kimi-K2.5", "KimiK25ForConditionalGeneration", 1026.5, Calls.KIMI_K2, stored=Stored.INT4,
        gigabytes=553.3,
    ),
    PublishedModel(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct", "KimiLinearForCausalLM", 49.1, Calls.KIMI_K2,
        preset="kimi-linear-48b-a3b",
    ),
    PublishedModel(
        "inclusionAI/Ling-2.6-flash", "BailingMoeV2_5ForCausalLM", 104.0, Calls.HERMES, preset="ling-2.6-flash"
    ),
    PublishedModel("inclusionAI/Ling-2.6-1T", "BailingMoeV2_5ForCausalLM", 1000.0, Calls.HERMES, stored=Stored.FP8),
    PublishedModel("inclusionAI/Ling-mini-2.0", "BailingMoeV2ForCausalLM", 16.3),
    PublishedModel("inclusionAI/Ring-1T", "BailingMoeV2ForCausalLM", 999.7),
    PublishedModel("meta-models/Muse-Glimmer-30B", "MuseGlimmerForConditionalGeneration", 27.9),
    PublishedModel("JetBrains/Mellum2-12B-A2.5B-Instruct", "MellumForCausalLM", 12.2, Calls.HERMES),
    PublishedModel("tencent/Hunyuan-7B-Instruct", "HunYuanDenseV1ForCausalLM", 7.5, Calls.HUNYUAN_DENSE),
    PublishedModel("tencent/HunyuanOCR", "HunYuanVLForConditionalGeneration", 0.5),
    PublishedModel("tencent/Hunyuan-A13B-Instruct", "HunYuanMoEV1ForCausalLM", 80.4, Calls.HUNYUAN_A13B),
    PublishedModel("poolside/Laguna-XS.2", "LagunaForCausalLM", 33.4, Calls.POOLSIDE_V1),
    PublishedModel("arcee-ai/Trinity-Large-Thinking", "AfmoeForCausalLM", 398.0, Calls.QWEN3_CODER),
    PublishedModel("XiaomiMiMo/MiMo-V2-Flash", "MiMoV2FlashForCausalLM", 308.8, Calls.MIMO, stored=Stored.FP8),
    PublishedModel("XiaomiMiMo/MiMo-V2.5", "MiMoV2ForCausalLM", 308.8, Calls.MIMO, stored=Stored.FP8),
    PublishedModel("XiaomiMiMo/MiMo-V2.5-Pro", "MiMoV2ForCausalLM", 1021.2, Calls.MIMO, stored=Stored.FP8),
    PublishedModel("stepfun-ai/Step-3.5-Flash", "Step3p5ForCausalLM", 197.0, Calls.STEP3P5),
    PublishedModel("stepfun-ai/Step-3.7-Flash", "Step3p7ForConditionalGeneration", 197.0, Calls.STEP3P5),
    PublishedModel("ibm-ai-platform/Bamba-9B-v2", "BambaForCausalLM", 9.78),
    PublishedModel("tiiuae/Falcon-H1-0.5B-Instruct", "FalconH1ForCausalLM", 0.52),
    PublishedModel("tiiuae/Falcon-H1-7B-Instruct", "FalconH1ForCausalLM", 7.59),
    PublishedModel("tiiuae/Falcon-H1-34B-Instruct", "FalconH1ForCausalLM", 33.6),
    PublishedModel("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "NemotronHForCausalLM", 8.89, Calls.NEMOTRON_JSON),
    PublishedModel(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "NemotronHForCausalLM", 31.6, Calls.QWEN3_CODER,
        preset="nemotron-3-nano-30b-a3b",
    ),
    PublishedModel(
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "NemotronHForCausalLM", 120.7, Calls.QWEN3_CODER,
        preset="nemotron-3-super-120b-a12b",
    ),
    PublishedModel(
        "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16", "NemotronH_Nano_Omni_Reasoning_V3", 31.6,
        Calls.QWEN3_CODER,
    ),
    PublishedModel("nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16", "NemotronH_Nano_VL_V2", 12.3, Calls.NEMOTRON_JSON),
    PublishedModel("nvidia/Llama-3_3-Nemotron-Super-49B-v1_5", "DeciLMForCausalLM", 49.9, Calls.NEMOTRON_JSON),
    PublishedModel("tencent/Hy3-preview", "HYV3ForCausalLM", 295.0, Calls.HY_V3),
    PublishedModel(
        "MiniMaxAI/MiniMax-M2", "MiniMaxM2ForCausalLM", 228.7, Calls.MINIMAX_M2, stored=Stored.FP8
    ),
    PublishedModel("LiquidAI/LFM2.5-1.2B-Instruct", "Lfm2ForCausalLM", 1.17, Calls.LFM2),
    PublishedModel("LiquidAI/LFM2-8B-A1B", "Lfm2MoeForCausalLM", 8.34, Calls.LFM2),
    PublishedModel("zai-org/GLM-OCR", "GlmOcrForConditionalGeneration", 0.67),
    PublishedModel("PaddlePaddle/PaddleOCR-VL", "PaddleOCRVLForConditionalGeneration", 0.47),
    PublishedModel("LiquidAI/LFM2.5-VL-1.6B", "Lfm2VlForConditionalGeneration", 1.17, Calls.LFM2),
    PublishedModel("mistral-community/pixtral-12b", "LlavaForConditionalGeneration", 12.2),
    PublishedModel("OpenGVLab/InternVL3-1B-hf", "InternVLForConditionalGeneration", 0.63),
    PublishedModel("OpenGVLab/InternVL3_5-8B", "InternVLChatModel", 8.19),
    PublishedModel("internlm/Intern-S1", "InternS1ForConditionalGeneration", 235.1),
    PublishedModel(
        "OpenGVLab/InternVL3_5-8B-HF", "InternVLForConditionalGeneration", 8.19, None, "internvl3.5-8b"
    ),
)  # fmt: skip
# Classes of transformers that are served, and of which no checkpoint is known or none is served on a GPU as yet.
UNPUBLISHED = (
    "NemotronH_Omni_Reasoning_V3",
    "Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM",
    "Glm46VForConditionalGeneration",
    "GraniteMoeSWAForCausalLM",
    "Llama4ForCausalLM",
    "MiniCPMV4_6ForConditionalGeneration",
    "Ministral3ForCausalLM",
    "MinistralForCausalLM",
    "OPTForCausalLM",  # its repositories have no safetensors
    "Mistral4ForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
