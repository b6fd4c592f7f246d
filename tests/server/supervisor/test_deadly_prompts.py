"""Prompts that engines died of are refused after the second, within a bound of memory and of time."""

from server.supervisor.deadly_prompts import MEMORY_S, MOST_REMEMBERED, MOST_SUSPECTS, DeadlyPrompts


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


def refused(subject: DeadlyPrompts, *prompts: list[int]) -> list[bool]:
    return [subject.refusal(prompt) is not None for prompt in prompts]


def test_the_second_death_refuses_and_an_hour_later_forgets() -> None:
    clock = Clock()
    subject = DeadlyPrompts(clock)
    subject.blame([[1, 2], [3], [3]])  # two answers to one prompt are one suspect
    assert refused(subject, [1, 2], [3]) == [False, False]
    clock.now += MEMORY_S - 1
    subject.blame([[1, 2]])
    assert refused(subject, [1, 2], [3], [1, 2, 3], [1]) == [True, False, False, False]
    clock.now += MEMORY_S + 1
    assert refused(subject, [1, 2]) == [False]
    subject.blame([[1, 2]])
    assert refused(subject, [1, 2]) == [False]


def test_a_prompt_that_was_answered_is_forgiven() -> None:
    subject = DeadlyPrompts()
    subject.blame([[1], [2]])
    subject.forgive([1])
    subject.forgive([4])
    subject.blame([[1], [2]])
    assert refused(subject, [1], [2]) == [False, True]


def test_many_suspects_are_refused_after_more_deaths() -> None:
    """64 clients that try again at once: what an engine answers meanwhile is none of them."""
    subject = DeadlyPrompts()
    many = [[index] for index in range(8 * MOST_SUSPECTS)]
    for _ in range(15):
        subject.blame(many)
    assert not any(refused(subject, *many))
    subject.forgive(many[0])
    subject.blame(many)
    assert refused(subject, *many) == [False] + [True] * (8 * MOST_SUSPECTS - 1)
    assert "16 engines died" in (subject.refusal(many[1]) or "")


def test_the_oldest_prompts_make_room() -> None:
    subject = DeadlyPrompts()
    subject.blame([[-1]])
    for index in range(MOST_REMEMBERED - 1):
        subject.blame([[index]])
    subject.blame([[-1]])  # of both deaths the latest counts
    for index in range(MOST_REMEMBERED - 1):
        subject.blame([[-2 - index]])
    assert refused(subject, [-1]) == [True]
    subject.blame([[-(10**6)]])
    assert refused(subject, [-1]) == [False]
