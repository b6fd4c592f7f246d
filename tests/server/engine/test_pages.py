import random

import pytest

from server.engine.pages import IntegrityError, PagePool


def test_growing_gives_whole_pages_and_releasing_takes_every_one_back() -> None:
    pool = PagePool(num_pages=4, page_size=16)
    assert pool.grow("a", 17)
    assert list(pool.table("a")) == [0, 1]
    assert pool.grow("a", 32)
    assert pool.num_used == 2
    pool.release("a")
    assert pool.num_free == 4
    assert list(pool.table("a")) == []


def test_growing_beyond_what_is_free_changes_nothing() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    assert pool.grow("a", 8)
    assert not pool.grow("b", 5)
    assert pool.num_used == 2
    assert list(pool.table("b")) == []


def test_a_table_is_a_copy() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    pool.grow("a", 1)
    table = pool.table("a")
    pool.grow("a", 12)
    assert list(table) == [0]


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(num_pages, page_size)


def test_a_random_walk_conserves_pages_and_never_shares_one() -> None:
    rng = random.Random(1)
    pool = PagePool(num_pages=37, page_size=8)
    lengths: dict[str, int] = {}
    for _ in range(3000):
        owner = f"r{rng.randrange(12)}"
        if owner in lengths and rng.random() < 0.3:
            pool.release(owner)
            del lengths[owner]
        else:
            wanted = lengths.get(owner, 0) + rng.randrange(1, 40)
            if pool.grow(owner, wanted):
                lengths[owner] = wanted
        pool.check_integrity(lengths)
        assert pool.num_used == sum(-(-n // 8) for n in lengths.values())


def test_integrity_names_a_stranger() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    pool.grow("ghost", 1)
    with pytest.raises(IntegrityError, match="ghost"):
        pool.check_integrity([])


def test_integrity_finds_a_page_that_two_requests_own() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    pool.grow("a", 1)
    pool.grow("b", 1)
    pool._tables["b"][0] = pool._tables["a"][0]
    with pytest.raises(IntegrityError, match="twice"):
        pool.check_integrity(["a", "b"])


def test_integrity_finds_a_lost_page() -> None:
    pool = PagePool(num_pages=3, page_size=4)
    pool._free.pop()
    with pytest.raises(IntegrityError, match="2 free"):
        pool.check_integrity([])
