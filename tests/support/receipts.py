"""A receipt without a server."""

import struct
from base64 import b64encode

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from qualification.receipt.content import (
    Bindings,
    Content,
    ReceiptAnswer,
    ReceiptPrompt,
    ReceiptSampling,
    UsedDecision,
    canonical,
    digest,
    digest_of_ids,
    digest_of_text,
)
from qualification.receipt.keys import public_key_of
from qualification.receipt.signed import sealed

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
BINDINGS = Bindings([], [], [], [], None)
SAMPLING = ReceiptSampling(
    max_tokens=16, min_tokens=0, temperature="0.7", top_k=None, top_p="1.0", min_p="0.0", repetition_penalty="1.0",
    presence_penalty="0.0", frequency_penalty="0.0", stop_token_ids=[], ignore_eos=False, seed=str(-(2**63)),
    bindings=BINDINGS, bindings_digest=digest(canonical(BINDINGS)),
)  # fmt: skip
PROMPT_IDS, ANSWER_IDS = [97, 98, 99], [72, 105, 256]
CONTENT = Content(
    version=2, id="0af1", created=1_700_000_000, route="/v1/completions", model="demo", server_version="1.2.3",
    weights_digest="ab" * 32, tokenizer_digest="cd" * 32, matrix_digest=None,
    fingerprint={"gpu": "a CPU of m\u00fcnchen", "sm": None, "threads": 2}, reproducible=True,
    decisions=[
        UsedDecision("prefill", "sdpa.math", "provisional", ["head_dim"], "keys512", "0123abcd"),
        UsedDecision("decode", "sdpa.cpu", "proven", [], "keys512", "4567cdef"),
    ],
    attestation=None, layers=None,
    prompts=[ReceiptPrompt(3, digest_of_ids(PROMPT_IDS), PROMPT_IDS, digest_of_text("abc"))],
    answers=[
        ReceiptAnswer(
            index=0, prompt=0, sampling=SAMPLING, num_tokens=3, token_ids_digest=digest_of_ids(ANSWER_IDS),
            token_ids=ANSWER_IDS, text_digest=digest_of_text("Hi"), reasoning_digest=None, calls_digest=None,
            logprobs=b64encode(struct.pack("<3f", -9.0, -13.125, -32.0)).decode(), finish_reason="stop", is_cut=False,
        )
    ],
)  # fmt: skip


def written(content: object, *, key: Ed25519PrivateKey = PRIVATE, signature: bytes | None = None) -> bytes:
    """A receipt of this content. `signature`: in place of the right one."""
    data = canonical(content)
    return sealed(data, public_key_of(key).key_id, key.sign(data) if signature is None else signature)
