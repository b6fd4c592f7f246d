import random
from collections.abc import Callable

import pytest

from server.engine.scheduling.page_keys import PageKeys
from server.engine.scheduling.pages import IntegrityError, PagePool


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(num_pages, page_size)


def test_a_random_walk_conserves_pages_and_shares_forks_only() -> None:
    rng = random.Random(1)
    pool = PagePool(num_pages=37, page_size=8)
    written: dict[str, list[int]] = {}  # of each owner, which no other owner has but by a fork
    num_forks = num_tokens = 0
    for _ in range(3000):
        owner = f"r{rng.randrange(12)}"
        new = list(range(num_tokens, num_tokens := num_tokens + rng.randrange(1, 40)))
        if owner in written and rng.random() < 0.3:
            pool.release(owner)
            del written[owner]
        elif owner not in written and written and rng.random() < 0.5:
            source = rng.choice(list(written))
            forked = written[source][: rng.randrange(1, len(written[source]) + 1)]
            copies = pool.fork(source, owner, len(forked))
            if copies is not None:
                assert copies == (
                    [(pool.table(source)[len(forked) // 8], pool.table(owner)[-1])] if len(forked) % 8 else []
                )
                written[owner] = forked
                num_forks += 1
        elif pool.grow(owner, len(written.get(owner, ())) + len(new)):
            written[owner] = written.get(owner, []) + new
        pool.check_integrity(written)
        contents: dict[int, set[tuple[int, ...]]] = {}
        for name, tokens in written.items():
            assert len(pool.table(name)) == pool.pages_for(len(tokens))
            for index, page in enumerate(pool.table(name)):
                contents.setdefault(page, set()).add(tuple(tokens[index * 8 : (index + 1) * 8]))
        assert pool.num_used == len(contents)
        assert all(len(found) == 1 for found in contents.values())
    assert num_forks > 100


def keys(text: str) -> list[bytes]:
    return [text[: i + 1].encode() for i in range(len(text))]


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


def test_kept_pages_go_the_longest_unused_and_last_ones_first() -> None:
    pool = PagePool(num_pages=5, page_size=4)
    for owner in "ab":
        pool.admit(owner, 8)
        pool.publish(owner, 0, keys(owner * 2))
    pool.release("b")
    pool.release("a")
    assert pool.admit("c", 12) == 0  # the free page, then those of b
    assert (pool.num_free, pool.num_cached) == (2, 2)
    assert pool.admit("d", 1, keys("bb")) == 0
    pool.release("d")
    assert pool.admit("e", 5, keys("aa")[:1]) == 1
    pool.check_integrity(["c", "e"])


DAMAGES = [
    (lambda pool: pool.grow("ghost", 1), "ghost"),
    (lambda pool: pool.pages("b").__setitem__(0, 0), "2 free .* 2 owned pages"),
    (lambda pool: pool.pages("b").__setitem__(0, 4), "a page is in two places"),
    (lambda pool: pool.pages("b").append(0), "page 0 has 2 owners, 1 are on record"),
    (lambda pool: pool.page_of_key.__setitem__(b"x", 1), "another page's key"),
    (lambda pool: pool.page_of_key.__setitem__(b"z", 4), "a key finds a page that has none"),
    (lambda pool: (pool.release("a"), pool.page_of_key.clear(), pool.key_of_page.clear()), "a cached page has no key"),
]


@pytest.mark.parametrize(("damage", "found"), DAMAGES)
def test_integrity_finds_what_is_damaged(damage: Callable[[PagePool], object], found: str) -> None:
    pool = PagePool(num_pages=5, page_size=4)
    pool.admit("a", 8)
    pool.publish("a", 0, keys("xy"))
    pool.grow("b", 1)
    pool.check_integrity("ab")
    damage(pool)
    with pytest.raises(IntegrityError, match=found):
        pool.check_integrity("ab")
