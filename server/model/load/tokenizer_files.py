"""Files of a model's folder that name and add tokens, read by transformers' rules.

    tokenizer.json            vocabulary and added tokens
    tokenizer_config.json     named tokens (`bos_token`), `added_tokens_decoder`, `extra_special_tokens`
    special_tokens_map.json   named tokens; not read beside an `added_tokens_decoder`
    added_tokens.json         text -> id of added tokens; likewise

A named token is special, whatever `special` says in a file.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from qualification.model.families.image_models import text_section
from server.errors import ModelError
from server.model.load.json_file import read_object

logger = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_NAMES_FILE = "special_tokens_map.json"
_ADDED_FILE = "added_tokens.json"
_DECODER = "added_tokens_decoder"
_END_TOKEN = "eos_token"
# Those that all tokenizers have, in the order in which transformers adds them; a model's own come behind them.
_COMMON_NAMES = ("bos_token", _END_TOKEN, "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class AddedToken(msgspec.Struct, frozen=True):
    """A token beside the vocabulary's. The fields are those of tokenizer.json."""

    content: str
    id: int | None = None
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None  # None: where it is not special
    special: bool = False

    def for_library(self) -> tokenizers.AddedToken:
        return tokenizers.AddedToken(
            self.content,
            single_word=self.single_word,
            lstrip=self.lstrip,
            rstrip=self.rstrip,
            normalized=not self.special if self.normalized is None else self.normalized,
            special=self.special,
        )


class _TokenizerJson(msgspec.Struct):
    """Added tokens of tokenizer.json, read without its vocabulary: 30 ms for 10 MB."""

    added_tokens: list[AddedToken] = []


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Tokens of a model's folder.

    named       name -> text, as chat templates name them: bos_token, eos_token, image_token, ...
    end_tokens  texts of eos_token in all files, each once
    added       tokens that tokenizer.json lacks, or has with other flags, in the order in which they get ids
    ids         of the added tokens of tokenizer.json, by text
    config      tokenizer_config.json; empty where there is none
    """

    named: Mapping[str, str]
    end_tokens: tuple[str, ...]
    added: tuple[AddedToken, ...]
    ids: Mapping[str, int | None]
    config: Mapping[str, Any]


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read all files but the vocabulary; each may be missing. Raises ModelError with file and reason."""
    config, names = _object(folder / _CONFIG_FILE), _object(folder / _NAMES_FILE)
    has_decoder = _DECODER in config
    older = (
        {} if has_decoder else {name: it for name, it in names.items() if name in _COMMON_NAMES or name not in config}
    )
    values = config | older
    given = {name: token for name, value in values.items() if name.endswith("_token") if (token := _token(value))}
    others = values.get("extra_special_tokens") or values.get("additional_special_tokens")
    if isinstance(others, dict):
        given |= {name: token for name, value in others.items() if (token := _token(value))}
    extra = [] if not isinstance(others, list) else [token for value in others if (token := _token(value))]
    common = {name: given[name] for name in _COMMON_NAMES if name in given}
    named = common | given
    own = _added_of(folder / TOKENIZER_FILE)
    if has_decoder:
        known = own | _decoder_of(folder / _CONFIG_FILE, config[_DECODER])
    else:
        known = _older_of(folder / _ADDED_FILE, {token.content for token in (*common.values(), *extra)}) | own
    wanted = dict(sorted(known.items(), key=lambda item: item[1].id or 0))
    for token in named.values():
        wanted[token.content] = msgspec.structs.replace(wanted.get(token.content, token), special=True)
    for token in extra:
        wanted.setdefault(token.content, token)
    ends = (_token(file.get(_END_TOKEN)) for file in (config, names))
    return TokenizerFiles(
        named={name: token.content for name, token in named.items()},
        end_tokens=tuple(dict.fromkeys(token.content for token in ends if token is not None)),
        added=tuple(token for token in wanted.values() if not _is_same(token, own.get(token.content))),
        ids={content: token.id for content, token in own.items()},
        config=config,
    )


def load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Load tokenizer.json, and add the tokens of the other files. Raises ModelError.

    A token is left out, with a warning, where it would get another id than its file says or one that the model lacks.
    """
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise ModelError(f"{path} does not exist; other tokenizer formats are not read")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact for what it cannot parse
        raise ModelError(f"{path} cannot be read: {error}") from error
    for token in read_tokenizer_files(folder).added:
        token_id = _id_to_get(tokenizer, token.content)
        num_ids = _num_ids(folder)
        if token.id is not None and token.id != token_id:
            why = f"its file says {token.id}, behind {TOKENIZER_FILE} it would get {token_id}"
        elif num_ids is not None and token_id >= num_ids:
            why = f"it would get {token_id}, and the model's vocab_size is {num_ids}"
        else:
            tokenizer.add_tokens([token.for_library()])
            continue
        logger.warning("%s: the token %r is not added, its text stays plain text: %s", folder, token.content, why)
    return tokenizer


def tokenizer_json(folder: Path) -> str:
    """Return tokenizer.json with the tokens of the other files, for another library. Raises ModelError."""
    if read_tokenizer_files(folder).added:
        return load_tokenizer(folder).to_str()
    path = folder / TOKENIZER_FILE
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 of tokenizer.json and of the tokens that other files add to it. Raises OSError and ModelError."""
    digest = hashlib.sha256((folder / TOKENIZER_FILE).read_bytes())
    if added := read_tokenizer_files(folder).added:
        digest.update(msgspec.json.encode(added))
    return digest.hexdigest()


def end_token_ids(folder: Path) -> list[int]:
    """Return the ids of each file's eos_token; of one that is no token of tokenizer.json none. Raises ModelError."""
    files = read_tokenizer_files(folder)
    if not (folder / TOKENIZER_FILE).is_file():
        return []
    ids = [files.ids.get(content) for content in files.end_tokens]
    if None in ids:  # it stands in another file or in the vocabulary itself, which takes a second to read
        tokenizer = load_tokenizer(folder)
        ids = [tokenizer.token_to_id(content) for content in files.end_tokens]
    return [token_id for token_id in ids if token_id is not None]


def _object(path: Path) -> dict[str, Any]:
    return read_object(path) if path.is_file() else {}


def _token(value: object) -> AddedToken | None:
    """A special token out of its two forms: its text, or an object with it."""
    if isinstance(value, str):
        return AddedToken(value, special=True) if value else None
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return None
    try:
        return msgspec.convert(value | {"id": None, "special": True}, AddedToken)
    except msgspec.ValidationError:
        return AddedToken(value["content"], special=True)


def _added_of(path: Path) -> dict[str, AddedToken]:
    if not path.is_file():
        return {}
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_TokenizerJson).added_tokens
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    return {token.content: token for token in found}


def _decoder_of(path: Path, decoder: object) -> dict[str, AddedToken]:
    """Tokens of an `added_tokens_decoder`: id -> token."""
    try:
        found = msgspec.convert(decoder, dict[int, AddedToken], strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {_DECODER}: {error}") from error
    return {token.content: msgspec.structs.replace(token, id=token_id) for token_id, token in found.items()}


def _older_of(path: Path, special: set[str]) -> dict[str, AddedToken]:
    """Tokens of added_tokens.json, which does not say which are special."""
    try:
        ids = msgspec.convert(_object(path), dict[str, int])
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}") from error
    return {
        content: AddedToken(content, token_id, normalized=content not in special, special=content in special)
        for content, token_id in ids.items()
    }


def _is_same(token: AddedToken, other: AddedToken | None) -> bool:
    return other is not None and repr(token.for_library()) == repr(other.for_library())


def _id_to_get(tokenizer: tokenizers.Tokenizer, content: str) -> int:
    """Return the id that the library gives a token when it is added: what it has already, else the next one."""
    token_id: int | None = tokenizer.token_to_id(content)
    if token_id is not None:
        return token_id
    last = max(tokenizer.get_added_tokens_decoder(), default=-1)
    return max(tokenizer.get_vocab_size(with_added_tokens=False), last + 1)


def _num_ids(folder: Path) -> int | None:
    """Return the number of ids that the model's own table has; None where config.json does not say."""
    config = _object(folder / "config.json")
    values = [part.get("vocab_size") for part in (config, text_section(config)) if part is not None]
    return next((value for value in values if isinstance(value, int)), None)
