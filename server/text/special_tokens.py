"""Control tokens that a text of a request only spells: encoded as plain text, and those of the chat template stay.

A user's "<|end|><|system|>" must not end the user's turn. Two steps, which change no other text:

    render   the chat template works on texts that remember which characters a request wrote (request_text.py)
    encode   replace the control tokens that the template alone has written by names that no text can spell, and
             encode the whole with a copy of the tokenizer whose control tokens have these names

One encoding of the whole text: there is no border at which a prefix space or a merge could come out otherwise.

Control tokens are those that the tokenizer calls special, and any other added token that the chat template writes.
"""

import json
import re
import secrets
from collections.abc import Collection
from itertools import groupby
from os.path import commonprefix
from typing import Any

import tokenizers

from server.errors import ModelError
from server.text.request_text import RequestText


class SpecialTokens:
    """The control tokens of a tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, control: Collection[str] = ()) -> None:
        """Builds a copy of `tokenizer`, 1 s for 128,000 tokens. Raises ModelError where its ids would be others.

        control  texts of added tokens that are control tokens although the tokenizer does not call them special
        """
        added = tokenizer.get_added_tokens_decoder()
        found = {i: token for i, token in added.items() if token.special or token.content in control}
        texts = {token.content for token in found.values()}
        self._original = tokenizer
        self._normalizer = tokenizer.normalizer
        normalized = [token.content for token in found.values() if token.normalized and self._normalizer is not None]
        self._normalized = [self._normalize(text).strip("▁ ") for text in normalized]
        self._starts = re.compile(starts_pattern(texts)) if texts else None
        self._longest = re.compile(_tree(texts))
        nonce = secrets.token_hex(16)  # of one length and closed: what follows a name cannot make it another one
        self._names = {text: f"<{nonce}:{i:06}>" for i, text in enumerate(sorted(texts))}
        self._copy = _renamed(tokenizer, self._names)
        for token_id, token in found.items():
            if self._copy.token_to_id(self._names[token.content]) != token_id:
                raise ModelError(
                    f"the special token {token.content!r} cannot be distinguished from a text that spells it; "
                    "--special-tokens-in-text serves this tokenizer without telling them apart"
                )

    def encode(self, text: RequestText, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered text: a control token with a character of the request's is plain text.

        add_special_tokens  whether the tokenizer's own stand around them
        """
        tokenizer, prompt = self._original, str.__str__(text)
        runs = text.template_runs() if self._names else ()
        written = [match.span() for start, end in runs for match in self._longest.finditer(prompt, start, end)]
        if self._is_spelled(prompt, text.spans, written):
            tokenizer, prompt = self._copy, self._with_names(prompt, written)
        # A batch of one, as in Tokenizer.encode: others run meanwhile.
        [encoding] = tokenizer.encode_batch_fast([prompt], add_special_tokens=False)
        if add_special_tokens:
            encoding = self._original.post_process(encoding)
        ids: list[int] = encoding.ids
        return ids

    def _is_spelled(self, prompt: str, spans: Collection[tuple[int, int]], written: list[tuple[int, int]]) -> bool:
        """Return whether a control token stands anywhere in `prompt` with a character of the request's."""
        if self._starts is None or not spans:
            return False
        spans = sorted(spans)
        at = 0
        for found in self._starts.finditer(prompt):
            longest = self._longest.match(prompt, found.start())
            assert longest is not None
            while at < len(spans) and spans[at][1] <= longest.start():
                at += 1
            if at == len(spans):
                break
            if spans[at][0] < longest.end():
                return True
        if not self._normalized:
            return False
        edges = [0, *(edge for place in written for edge in place), len(prompt)]
        between = (self._normalize(prompt[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True))
        return any(token in normal for normal in between for token in self._normalized)

    def _with_names(self, prompt: str, written: list[tuple[int, int]]) -> str:
        pieces, place = [], 0
        for start, end in written:
            pieces += [prompt[place:start], self._names[prompt[start:end]]]
            place = end
        return "".join([*pieces, prompt[place:]])

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
    """A copy of `tokenizer` in which the control tokens, the keys of `names`, have other names."""
    content = json.loads(tokenizer.to_str())
    content["post_processor"] = None  # it would only put special tokens around a text
    for token in content["added_tokens"]:
        if token["content"] in names:
            # As it stands and within a word too: the chat template has written it.
            token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
    _rename_in_model(content["model"], names)
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises nothing more exact
        raise ModelError(f"the tokenizer cannot be copied: {error}; --special-tokens-in-text needs no copy") from error


def _rename_in_model(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename the control tokens in the vocabulary itself, where it holds them: no plain text may become one."""
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
