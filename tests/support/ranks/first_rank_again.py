"""A rank like that of `ranks_follower.py`, which has loaded the layers of the first one's part."""

from dataclasses import replace

from server.engine.startup.subject import load_weights, read_subject
from server.model.layers import Weights
from support.ranks import ranks_follower
from support.ranks.ranks_engine import settings_of


def of_the_first(weights: Weights) -> Weights:
    settings = settings_of(2)
    return replace(weights, layers=load_weights(settings, read_subject(settings)).layers)


def main() -> None:
    ranks_follower.main(of_the_first)


if __name__ == "__main__":
    main()
