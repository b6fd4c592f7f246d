"""mem0: memories written as they are and drawn from a conversation, found again by their embeddings."""

import os

from checks import BASE_URL, EMBED_URL, FOLDER, MODEL, call, end, expect

os.environ |= {"MEM0_TELEMETRY": "False", "MEM0_DIR": FOLDER}  # which mem0 reads when it is imported

from mem0 import Memory

SIZE = 256  # of the demo's vectors; mem0 sends it with each request where it is configured
FACTS = ("Anna lives in Oslo.", "The whale is white.", "A train leaves at nine.")


def memory(*, store: str, llm: str = "openai", **embedder: object) -> Memory:
    address = {"model": MODEL, "api_key": "none", f"{llm}_base_url": BASE_URL}
    store_config = {"collection_name": store, "embedding_model_dims": SIZE, "path": f"{FOLDER}/{store}"}
    return Memory.from_config(
        {
            "llm": {"provider": llm, "config": address | {"max_tokens": 24}},
            "embedder": {
                "provider": "openai",
                "config": {"model": MODEL, "api_key": "none", "openai_base_url": EMBED_URL} | embedder,
            },
            "vector_store": {"provider": "qdrant", "config": store_config},
            "history_db_path": f"{FOLDER}/{store}.db",
        }
    )


def written(**embedder: object) -> None:
    kept = memory(store=f"written{len(embedder)}", **embedder)
    for fact in FACTS:
        kept.add(fact, user_id="anna", infer=False)
    found = kept.search(FACTS[1], filters={"user_id": "anna"}, top_k=1)["results"]
    expect([each["memory"] for each in found] == [FACTS[1]], f"a text is nearest to itself, not {found}")


def drawn(llm: str) -> None:
    """The demo extracts nothing that mem0 can use; what is not served raises LLMError."""
    found = memory(store=f"drawn-{llm}", llm=llm).add([{"role": "user", "content": FACTS[0]}], user_id="anna")
    expect(isinstance(found["results"], list), "a list of memories")


call("memories as written", written)
call("memories as written, size of embeddings", lambda: written(embedding_dims=SIZE))
call("memories drawn from a chat (openai)", lambda: drawn("openai"))
call("memories drawn from a chat (vllm)", lambda: drawn("vllm"))
end()
