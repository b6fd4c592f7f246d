"""Colours of servers: one server has one colour, whatever it stands beside."""

from qualification.common.svg import colours_of


def test_a_known_server_has_one_colour_everywhere() -> None:
    alone, beside = colours_of(["vllm"]), colours_of(["hallmark", "sglang", "vllm-0.26", "other"])
    assert alone["vllm"] == beside["vllm-0.26"]
    assert colours_of(["other", "hallmark"])["hallmark"] == beside["hallmark"]


def test_no_two_servers_of_a_chart_share_a_colour() -> None:
    found = colours_of(["hallmark", "hallmark-old", "vllm", "a", "b"])
    assert len(set(found.values())) == 5
