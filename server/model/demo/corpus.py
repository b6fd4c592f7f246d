"""Training text made of public-domain books: cleaning, the held-out split and rule-made conversations."""

import random
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.02  # the tail of every book, by characters
FRONT_MATTER_ENDS_AT_CHARS = 300  # the first paragraph this long ends title, contents and notes
PROSE_LINE_CHARS = 55  # hard-wrapped prose has longer lines on average, verse shorter ones
REPLY_WORDS = (50, 180)

Turn = tuple[str, str]  # role, text
Conversation = list[Turn]

CONTINUE_REQUESTS = (
    "Continue this story: {}",
    "Continue: {}",
    "Write what happens next. {}",
    "Please go on with this text.\n\n{}",
    "{}",
)
NAME_REQUESTS = (
    "Tell me about {}.",
    "Who is {}?",
    "Tell me a story about {}.",
    "What do you know about {}?",
    "Write something about {}.",
    "What happened to {}?",
)
NOUN_REQUESTS = (
    "Tell me about the {}.",
    "Tell me a story about a {}.",
    "Write a story about the {}.",
    "What about the {}?",
    "Write a few sentences about a {}.",
)
STORY_REQUESTS = ("Tell me a story.", "Write a story.", "Tell me a tale.", "Can you tell me a story?", "Start a story.")
NEXT_REQUESTS = ("Go on.", "What happened next?", "Continue.", "And then?", "Please continue.", "Tell me more.")
SYSTEM_TEXTS = ("You are a helpful assistant.", "You tell old stories.", "You are a storyteller.")
# The only text here that is not from the books: without it a greeting would be answered by a fight on Mars.
GREETINGS = ("Hello!", "Hello", "Hi", "Hi there", "Good morning.", "Hey!", "Who are you?", "What are you?")
GREETING_REPLIES = (
    "Hello! I am a very small model that has read fifteen old books. Ask me for a story.",
    "Good day to you. I know a few old books and nothing else. Shall I tell you a story?",
    "Hello, my friend. Give me the beginning of a story and I will go on with it.",
)
STORY_OPENINGS = ("Once ", "There was", "There were", "There lived", "One day", "One morning", "One night", "A certain")


@dataclass(frozen=True, slots=True)
class Book:
    """Paragraphs of one book in reading order; `held_out` is its end and is never trained on."""

    train: list[str]
    held_out: list[str]


def read_books(folder: Path) -> list[Book]:
    """Read and split every *.txt of the folder, in the order of their names. Raises FileNotFoundError when none."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise FileNotFoundError(f"no *.txt in {folder}")
    return [split_tail(clean(file.read_text(encoding="utf-8"))) for file in files]


def split_tail(paragraphs: list[str]) -> Book:
    budget = HELD_OUT_SHARE * sum(map(len, paragraphs))
    cut = len(paragraphs)
    while cut > 0 and budget > 0:
        cut -= 1
        budget -= len(paragraphs[cut])
    return Book(paragraphs[:cut], paragraphs[cut:])


def clean(text: str) -> list[str]:
    """Paragraphs with one style of quotes and dashes, prose lines joined, front matter and bracketed notes dropped."""
    text = re.sub(r"[“”]", '"', re.sub(r"[‘’]", "'", text.replace("\r\n", "\n").lstrip("\ufeff")))
    text = re.sub(r" *-{2,} *", "—", text.replace("_", ""))
    blocks = [join_lines(block) for block in re.split(r"\n\s*\n", text)]
    paragraphs = [block for block in blocks if any(map(str.isalpha, block)) and not is_furniture(block)]
    lengths = (len(paragraph) >= FRONT_MATTER_ENDS_AT_CHARS for paragraph in paragraphs)
    start = next((index for index, is_long in enumerate(lengths) if is_long), 0)
    return paragraphs[start:]


def is_furniture(block: str) -> bool:
    """A bracketed note of the edition, or a table of contents: many lines that end without punctuation."""
    lines = block.split("\n")
    num_open = sum(line[-1] not in ".,;:!?\"'—" for line in lines)
    return block.startswith("[") or (len(lines) >= 6 and num_open >= 0.8 * len(lines))


def join_lines(block: str) -> str:
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    wrapped = lines[:-1]
    is_prose = bool(wrapped) and sum(map(len, wrapped)) / len(wrapped) >= PROSE_LINE_CHARS
    return re.sub(r" {2,}", " ", (" " if is_prose else "\n").join(lines))


def sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?]) (?=[\"'A-Z])|(?<=[.!?][\"']) (?=[\"'A-Z])", text)


class ConversationMaker:
    """Draws conversations from the prose of one list of paragraphs; the same seed draws the same ones."""

    def __init__(self, paragraphs: list[str], rng: random.Random) -> None:
        self._rng = rng
        # Verse and headings stay out, so that a chat streams prose.
        self._prose = [p for p in paragraphs if "\n" not in p and (len(p) > 60 or p.endswith((".", '"', "!", "?")))]
        mentions = Counter(name for p in self._prose for name in set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{2,}", p)))
        self._names = {name for name, count in mentions.items() if count >= 5}
        # A reply to a request for a story starts with narration, not in the middle of a dialogue.
        self._narration = [i for i, p in enumerate(self._prose) if p[0].isupper() and len(p) > 150]
        self._openings = [i for i in self._narration if self._prose[i].startswith(STORY_OPENINGS)]

    def draw(self) -> Conversation:
        rng = self._rng
        if rng.random() < 0.03:
            return [("user", rng.choice(GREETINGS)), ("assistant", rng.choice(GREETING_REPLIES))]
        start = rng.randrange(len(self._prose))
        kind = rng.random()
        if kind < 0.1 and self._openings:
            start = rng.choice(self._openings)
            request, after = self._about(start) if rng.random() < 0.5 else rng.choice(STORY_REQUESTS), start
        elif kind < 0.5:
            start = rng.choice(self._narration)
            request, after = self._about(start), start
        elif kind < 0.6:
            request, after = self._continue_long(start)
        else:
            request, after = self._continue(start)
        reply, after = self._reply(after)
        if not reply:  # the books ended before it
            return self.draw()
        turns = [("user", request), ("assistant", reply)]
        while after < len(self._prose) and rng.random() < 0.25:
            reply, after = self._reply(after)
            turns += [("user", rng.choice(NEXT_REQUESTS)), ("assistant", reply)]
        return [("system", rng.choice(SYSTEM_TEXTS)), *turns] if rng.random() < 0.15 else turns

    def _about(self, start: int) -> str:
        head = self._prose[start][:200]
        names = [name for name in re.findall(r"\b[A-Z][a-z]{2,}\b", head) if name in self._names]
        nouns = re.findall(r"\b(?:an?|the) ([a-z]{3,})(?=[,.;!?]| (?:was|is|had|who|that|and|of|in|to|with)\b)", head)
        if names and (not nouns or self._rng.random() < 0.6):
            return self._rng.choice(NAME_REQUESTS).format(self._rng.choice(names))
        if nouns:
            return self._rng.choice(NOUN_REQUESTS).format(self._rng.choice(nouns))
        return self._rng.choice(STORY_REQUESTS)

    def _continue(self, start: int) -> tuple[str, int]:
        given = " ".join(sentences(self._prose[start])[-self._rng.randint(1, 4) :])
        return self._rng.choice(CONTINUE_REQUESTS).format(given), start + 1

    def _continue_long(self, start: int) -> tuple[str, int]:
        words, end, limit = 0, start, self._rng.randint(200, 2200)
        while end < len(self._prose) and words < limit:
            words += len(self._prose[end].split())
            end += 1
        return self._rng.choice(CONTINUE_REQUESTS).format("\n\n".join(self._prose[start:end])), end

    def _reply(self, start: int) -> tuple[str, int]:
        """Whole sentences from paragraph `start` on, and the paragraph after them; empty at the end of the book."""
        fewest, most = REPLY_WORDS
        words, end, parts = 0, start, list[str]()
        while end < len(self._prose) and words < fewest:
            kept = list[str]()
            for sentence in sentences(self._prose[end]):
                words += len(sentence.split())
                if kept and words > most:
                    break
                kept.append(sentence)
            parts.append(" ".join(kept))
            end += 1
        return "\n\n".join(parts), end
