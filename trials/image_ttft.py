"""Time a chat with one image until its first token, of any server with OpenAI's API, one request after another.

python trials/image_ttft.py --folder FOLDER                          writes a model of Qwen2.5-VL-7B's sizes, no weights
python trials/image_ttft.py --url http://127.0.0.1:8000 --out FILE   asks a server

Each request has an image of its own, 1024 x 1024 pixels as JPEG, and some 64 tokens of text; it asks for one token, so
that the time of the answer is that to the first token. No image comes twice: no cache of images or prompts helps.
The folder has no weights: serve it with `--load-format dummy`, here or by vLLM.
"""

import argparse
import base64
import io
import json
import random
import shutil
import statistics
import sys
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

from PIL import Image
from tokenizers import AddedToken, Tokenizer

from qualification.decision.presets import preset_named

DEMO = Path(__file__).resolve().parents[1] / "server" / "model" / "demo"
FIRST_ADDED = 4096  # the demo's tokens are before
ADDED = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_folder(folder: Path) -> None:
    """Write a folder that a server starts with: the preset's configuration, the demo's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = {name: FIRST_ADDED + place for place, name in enumerate(ADDED)}
    config = dict(preset_named("qwen2.5-vl-7b").config) | {
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 4,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen2_5_VLProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=1))
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    of_demo = json.loads((DEMO / "tokenizer_config.json").read_text())
    of_demo["added_tokens_decoder"] |= {str(at): {"content": name, "special": True} for name, at in ids.items()}
    of_demo["chat_template"] = TEMPLATE
    of_demo["model_max_length"] = 128000
    (folder / "tokenizer_config.json").write_text(json.dumps(of_demo))
    shutil.copy(DEMO / "generation_config.json", folder)


def image_of(draw: random.Random, side: int) -> str:
    """Return a smooth random image as a data URI."""
    small = Image.frombytes("RGB", (48, 48), draw.randbytes(3 * 48 * 48))
    file = io.BytesIO()
    small.resize((side, side), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def asked(url: str, model: str, content: list[dict[str, object]]) -> tuple[float, dict[str, object]]:
    """Return the seconds of a chat of one token, and the answer."""
    body = json.dumps(
        {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
    ).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.loads(answer.read())
    return time.perf_counter() - started, found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--name", default="hallmark")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--warm", type=int, default=3)
    parser.add_argument("--side", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.folder is not None:
        write_folder(args.folder)
    if args.url is None:
        return 0
    with urllib.request.urlopen(f"{args.url}/v1/models", timeout=10) as models:
        model = json.loads(models.read())["data"][0]["id"]
    draw = random.Random(args.seed)
    rows: dict[str, list[float]] = {"image": [], "text": []}
    usage: dict[str, object] = {}
    for number in range(args.warm + args.requests):
        text = " ".join(draw.choice(("tree", "house", "river", "stone", "cloud")) for _ in range(60))
        parts: list[dict[str, object]] = [{"type": "text", "text": text}]
        image: dict[str, object] = {"type": "image_url", "image_url": {"url": image_of(draw, args.side)}}
        for kind, content in (("image", [image, *parts]), ("text", parts)):
            seconds, answer = asked(args.url, model, content)
            usage[kind] = answer["usage"]
            if number >= args.warm:
                rows[kind].append(1000 * seconds)
    found = {
        "server": args.name,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "side": args.side,
        "usage": usage,
        "ttft_ms": {
            kind: {
                "p50": round(statistics.median(times), 2),
                "least": round(min(times), 2),
                "most": round(max(times), 2),
                "n": len(times),
            }
            for kind, times in rows.items()
        },
    }
    print(json.dumps(found), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
