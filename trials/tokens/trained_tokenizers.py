"""Tokenizers of each kind, trained on the pages of docs/, in folders as models have them."""

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = Path(__file__).resolve().parents[2]
_NUM_TOKENS = 3000
_SPECIAL = ["<unk>", "<s>", "</s>"]
_LLAMA3 = (  # how Llama 3 and GPT-4 cut a text into words
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _texts() -> Iterator[str]:
    for path in sorted((ROOT / "docs").glob("*.md")):
        yield from path.read_text("utf-8").splitlines(keepends=True)
    yield from ["Ünïcödé, 日本語のテキスト。\n", "Привет, мир!\n", "مرحبا بالعالم\n", "🎉👩‍👧 emoji\n"] * 20


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_NUM_TOKENS, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _llama2() -> Tokenizer:
    """BPE with fallback to bytes, whose decoder takes the first space away: Llama 2, Mistral 7B, Phi 3."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    special = [*_SPECIAL, *bytes_of]
    trainer = trainers.BpeTrainer(
        vocab_size=_NUM_TOKENS, special_tokens=special, limit_alphabet=120, show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    content = json.loads(tokenizer.to_str())  # the bytes are pieces, not tokens that a text can spell
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in _SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    begin = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[begin])
    return tokenizer


def _metaspace(scheme: str) -> Tokenizer:
    """BPE whose words begin with a mark for the space: at every word, or at a text's first one alone."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme, split=scheme == "always")
    trainer = trainers.BpeTrainer(vocab_size=_NUM_TOKENS, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=_NUM_TOKENS, special_tokens=_SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=_NUM_TOKENS, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _several_files(folder: Path, tokenizer: Tokenizer) -> None:
    """Added tokens as fine-tunes have them: some in each file, and marked otherwise there."""
    tokenizer.add_tokens([AddedToken("<|im_end|>", normalized=False)])
    size = tokenizer.get_vocab_size()
    _save(folder, tokenizer, {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|tool|>"]})
    added = {"<think>": size, "</think>": size + 1, "<|tool|>": size + 2}
    (folder / "added_tokens.json").write_text(json.dumps(added))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>", "lstrip": False}}))


def _save(folder: Path, tokenizer: Tokenizer, config: dict[str, object]) -> None:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))


def write_trained(place: Path) -> list[Path]:
    """Train all kinds, some 20 s of a core; return their folders."""
    named: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = {
        "byte-level-bpe": _byte_level(),
        "bpe-byte-fallback-strip": _llama2(),
        "bpe-metaspace-always": _metaspace("always"),
        "bpe-metaspace-first": _metaspace("first"),
        "unigram-metaspace": _unigram(),
        "word-piece": _word_piece(),
    }
    for name, tokenizer in made.items():
        _save(place / name, tokenizer, named)
    _several_files(place / "tokens-in-several-files", _byte_level())
    return [place / name for name in (*made, "tokens-in-several-files")]
