"""Special tokens that a message only spells: they are encoded as plain text, and those of the chat template stay.

A user's "<|end|><|system|>" must not end the user's turn. Three steps, none of which changes any other text:

    mark     put MARK behind the first character of each special token's text in a message
    render   the chat template trims and joins as ever, and writes its own special tokens without MARK
    encode   replace the template's special tokens by names that no text can spell, remove MARK, and encode the whole
             with a copy of the tokenizer whose special tokens have these names

One encoding of the whole text: there is no border at which a prefix space or a merge could come out otherwise.
"""

import json
import re
import secrets
from itertools import groupby
from os.path import commonprefix
from typing import Any

import tokenizers

from server.errors import ModelError

MARK = "\udc00"  # half a surrogate pair: UTF-8 cannot carry it, so that no request can hold it


class SpecialTokens:
    """The special tokens of a tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Builds a copy of `tokenizer`, 1 s for 128,000 tokens. Raises ModelError where its ids would be others."""
        found = {token_id: token for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        texts = {token.content for token in found.values()}
        self._normalizer = tokenizer.normalizer
        normalized = [token.content for token in found.values() if token.normalized and self._normalizer is not None]
        self._normalized = [self._normalize(text).strip("▁ ") for text in normalized]
        beginnings = {text[:end] for text in texts for end in range(1, len(text))}
        # None where special tokens are normalized: in the copy they are not, and a marked text's ids could be others.
        self._beginnings = () if self._normalized else tuple(sorted(beginnings))
        self._starts = re.compile(starts_pattern(texts)) if texts else None
        self._whole = re.compile(f"{_tree(texts)}(?!{MARK})") if texts else None
        nonce = secrets.token_hex(16)  # of one length and closed: what follows a name cannot make it another one
        self._names = {text: f"<{nonce}:{i:06}>" for i, text in enumerate(sorted(texts))}
        self._tokenizer = _renamed(tokenizer, self._names)
        for token_id, token in found.items():
            if self._tokenizer.token_to_id(self._names[token.content]) != token_id:
                raise ModelError(
                    f"the special token {token.content!r} cannot be distinguished from a text that spells it; "
                    "--special-tokens-in-text serves this tokenizer without telling them apart"
                )

    def mark(self, text: str) -> str:
        """`text` with MARK behind the first character of each special token's text.

        And of the beginning of one at its end, which another message could complete.
        """
        text = self._mark_end(text)
        marked = text if self._starts is None else self._starts.sub(rf"\g<0>{MARK}", text)
        if self._normalized and marked == text:  # it may become a special token's text when it is normalized
            normal = self._normalize(text)
            if any(token in normal for token in self._normalized):
                return re.sub(r"\S", rf"\g<0>{MARK}", text, count=1)
        return marked

    def _mark_end(self, text: str) -> str:
        end = text.rstrip()  # as a template may
        if not end.endswith(self._beginnings):
            return text
        places = {1 + len(end) - len(beginning) for beginning in self._beginnings if end.endswith(beginning)}
        for place in sorted(places, reverse=True):
            text = text[:place] + MARK + text[place:]
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text: what is marked is plain text, a special token without MARK is special."""
        if self._whole is not None:
            text = self._whole.sub(lambda match: self._names[match[0]], text)
        # A batch of one, as in Tokenizer.encode: others run meanwhile.
        [encoding] = self._tokenizer.encode_batch_fast([text.replace(MARK, "")], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _normalize(self, text: str) -> str:
        return str(self._normalizer.normalize_str(text))


def starts_pattern(texts: set[str]) -> str:
    """A pattern for the first character of any of `texts`, wherever one stands, overlapping ones too.

    Common beginnings are written once: the time for a character does not grow with the number of texts.
    """
    branches = {text[0] for text in texts}
    return "|".join(
        f"{re.escape(first)}(?={_tree({text[1:] for text in texts if text[0] == first}, is_longest=False)})"
        for first in sorted(branches)
    )


def _tree(texts: set[str], *, is_longest: bool = True) -> str:
    """A pattern for the longest of `texts`, or else for whether any stands there."""
    rest = sorted(texts - {""})
    if not rest or ("" in texts and not is_longest):
        return ""
    branches = []
    for _, group in groupby(rest, key=lambda text: text[0]):
        members = [*group]
        common = commonprefix(members)  # noqa: RUF071 -- characters are meant
        rests = {text[len(common) :] for text in members}
        branches.append(re.escape(common) + _tree(rests, is_longest=is_longest))
    return f"(?:{'|'.join(branches)})" + ("?" if "" in texts else "")


def _renamed(tokenizer: tokenizers.Tokenizer, names: dict[str, str]) -> tokenizers.Tokenizer:
    """A copy of `tokenizer` whose special tokens, the keys of `names`, have other names."""
    content = json.loads(tokenizer.to_str())
    content["post_processor"] = None  # it would only put special tokens around a text
    for token in content["added_tokens"]:
        if token["special"]:
            # As it stands and within a word too: the chat template has written it.
            token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
    _rename_in_model(content["model"], names)
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises nothing more exact
        raise ModelError(f"the tokenizer cannot be copied: {error}; --special-tokens-in-text needs no copy") from error


def _rename_in_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename the special tokens in the vocabulary itself, where it holds them: no plain text may become one."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in vocab.items()}
    elif isinstance(vocab, list):  # Unigram: pairs of a piece and its score
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
        model["merges"] = [pair for pair in pairs if not {*pair, "".join(pair)} & names.keys()]
