"""The prompt by which Qwen3-Reranker judges a document, as its authors publish it."""

from server.errors import ModelError
from server.text.request_text import RequestText
from server.text.tokenizer import Tokenizer

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class RerankPrompt:
    """Makes prompts whose next token is yes or no."""

    def __init__(
        self, tokenizer: Tokenizer, label_ids: tuple[int, int] | None, *, special_tokens_in_text: bool = False
    ) -> None:
        """`label_ids`: those that the model's own files name. Raises ModelError for a model of another prompt."""
        for text in ("<|im_start|>", "<|im_end|>"):
            if not set(_ids(tokenizer, text)) <= tokenizer.special_ids:
                raise ModelError(f"task score needs Qwen3-Reranker's prompt, and {text} is no special token here")
        yes, no = _ids(tokenizer, "yes"), _ids(tokenizer, "no")
        if len(yes) != 1 or len(no) != 1 or label_ids not in (None, (yes[0], no[0])):
            raise ModelError("task score needs Qwen3-Reranker's labels: yes and no, of one token each")
        self.label_ids = (yes[0], no[0])
        self._tokenizer = tokenizer
        self._prefix = _ids(tokenizer, _PREFIX)
        self._suffix = _ids(tokenizer, _SUFFIX)
        self._guards = not special_tokens_in_text
        if self._guards:
            _ = tokenizer.special_tokens  # built here, and not in the first request

    def token_ids(self, query: str, document: str, instruction: str | None) -> list[int]:
        """The prompt of a pair of texts, which cannot spell special tokens unless the settings let them."""
        text = f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        given = RequestText(text) if self._guards else text
        return [*self._prefix, *_ids(self._tokenizer, given), *self._suffix]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
