"""`make test-routers` without its routers: what is made of what they choose, and the page."""

import pytest
from routers import NOT_HERE, ROUTERS
from run_routers import BEGIN, END, PAGE, Choices, Found, row

MVLLM = ROUTERS[0]


@pytest.mark.parametrize(
    ("choices", "is_by_load"),
    [(Choices(0, 10), True), (Choices(2, 8), True), (Choices(3, 10), False), (Choices(5, 5), False)],
)
def test_a_choice_by_load_avoids_whichever_server_is_busy(choices: Choices, is_by_load: bool) -> None:
    assert choices.is_by_load is is_by_load


def test_a_row_says_what_was_seen_or_that_nothing_was() -> None:
    about = (MVLLM.name, MVLLM.version, f"`{MVLLM.policy}`")
    named, bare = Found({}, Choices(0, 10)), Found({}, Choices(10, 10))
    assert row(MVLLM, named, bare) == (*about, "work", "0 and 10", "10 and 10")
    assert row(MVLLM, Found({"chat": "400: no"}, None), bare) == (*about, "fail: chat", "", "")
    assert row(MVLLM, None, None)[3].startswith("not run")


def test_page_has_a_row_for_each_router_with_its_version() -> None:
    written = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in written.splitlines() if line.startswith("| ")]
    expected = [[router.name, router.version] for router in ROUTERS] + [list(it[:2]) for it in NOT_HERE]
    assert rows[2:] == expected, "run make test-routers"
