"""Rules of a grammar while they are made, in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Callable, Collection, Mapping

from server.protocol.messages import Grammar, GrammarKind


class Rules:
    """Names rules and terminals."""

    def __init__(self, added_ids: Mapping[str, int]) -> None:
        """`added_ids`: ids of the tokenizer's added tokens by their text; a mark such as <tool_call> may be one."""
        self._added_ids = added_ids
        self._tokens: list[int] = []
        self._lines: dict[str, str] = {}  # what stands right of the colon -> the name

    def rule(self, body: str) -> str:
        """Return the name of a rule; one body has one rule."""
        return self._lines.setdefault(body, f"rule_{len(self._lines)}")

    def recursive(self, body_of: Callable[[str], str]) -> str:
        """Return the name of a rule whose body, which is made of that name, has the rule itself in it."""
        name = f"again_{len(self._lines)}"
        self._lines[name] = name  # its number is taken while the body is made
        body = body_of(name)
        del self._lines[name]
        return self._lines.setdefault(body, name)

    def terminal(self, pattern: str) -> str:
        """Return the name of a terminal: a regular expression between slashes, or several."""
        return self._lines.setdefault(pattern, f"TEXT_{len(self._lines)}")

    def json(self, schema: str) -> str:
        """Return the name of a rule for JSON of a schema."""
        return self.rule(f"%json {schema}")

    def has_token(self, mark: str) -> bool:
        return mark in self._added_ids

    def literal(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False)

    def sequence(self, text: str, marks: Collection[str]) -> str:
        """Return a text whose `marks` are tokens where the tokenizer has such."""
        known = [re.escape(mark) for mark in marks if mark in self._added_ids]
        parts = re.split(f"({'|'.join(known)})", text) if known else [text]
        return " ".join(self._token(part) or self.literal(part) for part in parts if part)

    def text_until(
        self, closing: str, marks: Collection[str], *, avoided: Collection[str] = (), body: str = "(?s:.*)"
    ) -> str:
        """Return any text that matches `body`, has neither `closing` nor `avoided` in it, and the closing text.

        The lexer is greedy: what is no token belongs to the same terminal as the text before it.
        """
        known = [mark for mark in marks if mark in closing and mark in self._added_ids]
        first = min(known, key=closing.index, default=None)
        ends = "|".join(map(_escaped, [first or closing, *avoided]))
        if first is not None:
            head = closing.partition(first)[0]
            text = self.terminal(f"/{body}{_escaped(head)}/ & ~/(?s:.*)({ends})(?s:.*)/ & /(?s:.+)/")
            is_optional = not head and re.fullmatch(body, "") is not None
            return f"{text}{'?' if is_optional else ''} {self.sequence(closing[len(head) :], marks)}"
        return self.terminal(f"/{body}{_escaped(closing)}/ & ~/(?s:.*)({ends})(?s:.+)/")

    def grammar(self, name: str, body: str, param: str) -> Grammar:
        """Return the rules and a first one, as a grammar. `param`: the request's field that it was made of."""
        lines = [f"{name}: {body}", *(f"{name}: {body}" for body, name in self._lines.items())]
        return Grammar(GrammarKind.LARK, "\n".join(lines), param, tokens=tuple(self._tokens))

    def _token(self, mark: str) -> str | None:
        token_id = self._added_ids.get(mark)
        if token_id is None:
            return None
        if token_id not in self._tokens:
            self._tokens.append(token_id)
        return f"token_{self._tokens.index(token_id)}"


def _escaped(text: str) -> str:
    """A text as a regular expression between slashes. Rust's has no escaped < and >: those are borders of words."""
    return re.sub(r"[.^$*+?()\[\]{}|\\/&~#-]", r"\\\g<0>", text).replace("\n", r"\n")
