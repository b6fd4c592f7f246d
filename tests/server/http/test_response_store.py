"""The store of responses stays within its limits, whoever fills it."""

import random

import pytest

from server.errors import ResponseNotFound
from server.http.responses.store import ResponseStore, Stored


def held(store: ResponseStore, tenant: bytes, names: list[str]) -> list[str]:
    found = []
    for name in names:
        try:
            store.get(tenant, name)
        except ResponseNotFound:
            continue
        found.append(name)
    return found


def test_the_oldest_of_who_stores_most_makes_room() -> None:
    store = ResponseStore(10**6, 4)
    store.put(b"small", "s", Stored(b"x", b""))
    for name in "abcde":
        store.put(b"large", name, Stored(b"x" * 100, b""))
    assert held(store, b"small", ["s"]) == ["s"]
    assert held(store, b"large", [*"abcde"]) == [*"cde"]


@pytest.mark.parametrize("order", ["mxmxmx", "xxxmmm", "mmmxxx"])
def test_the_most_bytes_make_room_not_the_most_answers(order: str) -> None:
    """One tenant has three large answers, the other thirty small ones with fewer bytes in all."""
    store = ResponseStore(10**6, 33)
    for i, kind in enumerate(order):
        for j in range(10 if kind == "m" else 1):
            store.put(b"many" if kind == "m" else b"large", f"{i}-{j}", Stored(b"x" * (50_000 * (kind == "x")), b""))
    assert store.num_entries == 33
    store.put(b"other", "new", Stored(b"", b""))
    oldest = f"{order.index('x')}-0"
    assert held(store, b"large", [oldest]) == []
    assert store.num_entries == 33
    assert held(store, b"other", ["new"]) == ["new"]


@pytest.mark.parametrize("limits", [(50_000, 1000), (10**9, 7), (10**9, 0)])
def test_a_store_holds_its_limits_and_counts(limits: tuple[int, int]) -> None:
    rng, store = random.Random(5), ResponseStore(*limits)
    expected: dict[tuple[bytes, str], Stored] = {}
    for i in range(300):
        tenant, stored = rng.choice([b"", b"a", b"b"]), Stored(bytes(rng.randrange(20_000)), bytes(rng.randrange(99)))
        store.put(tenant, str(i), stored)
        expected[tenant, str(i)] = stored
        for who in (b"", b"a", b"b"):
            names = [name for tenant, name in expected if tenant == who]
            gone = set(names) - set(held(store, who, names))
            assert not gone or sorted(gone, key=int) == sorted(names, key=int)[: len(gone)]
            for name in gone:
                del expected[who, name]
        if expected and rng.random() < 0.2:
            who, name = rng.choice([*expected])
            store.delete(who, name)
            del expected[who, name]
        assert (store.num_entries, store.num_bytes) == (len(expected), sum(it.num_bytes for it in expected.values()))
        assert store.num_bytes <= limits[0]
        assert store.num_entries <= limits[1]
    assert not expected if not limits[1] else expected
