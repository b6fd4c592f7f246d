from server.engine.scheduling.page_keys import PageKeys


def test_a_page_is_named_by_all_tokens_before_and_the_salt() -> None:
    tokens = list(range(12))
    names = PageKeys(4).first(3, tokens)
    assert len(set(names)) == 3
    assert PageKeys(4).first(3, tokens) == names
    changed = [99, *tokens[1:]]
    assert not set(PageKeys(4).first(3, changed)) & set(names)
    assert PageKeys(4).first(3, [*tokens[:11], 99])[:2] == names[:2]
    assert not set(PageKeys(4, b"tenant").first(3, tokens)) & set(names)


def test_naming_pages_reads_each_token_once() -> None:
    num_read = 0

    class Read(list[int]):
        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            nonlocal num_read
            found = super().__getitem__(key)
            num_read += len(found) if isinstance(key, slice) else 1
            return found

    PageKeys(64).first(1024, Read(range(65_536)))
    assert num_read == 65_536
