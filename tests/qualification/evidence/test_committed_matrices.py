"""The committed matrices are of today's kernels and checks, or their GPU is named as waiting for a new run."""

import re
from collections import Counter
from dataclasses import replace

from kernels.catalog import ALL_PATHS
from kernels.linear.paths import LINEAR_PATHS
from kernels.linear.shape import LinearShape
from kernels.vocabulary.path import AnyPath
from qualification.evidence.choice import choice_of
from qualification.evidence.evidence import SUITE, Evidence
from qualification.evidence.matrix import MATRICES, load_matrix
from support.qualification_fakes import SHAPE, evidence, path

A = path("a")


def is_stale(entry: Evidence, paths: dict[str, AnyPath]) -> bool:
    known = paths.get(entry.path)
    return known is None or entry.suite != SUITE or entry.source_digest != known.source_digest


def test_a_stale_row_is_seen() -> None:
    assert not is_stale(evidence(SHAPE, A), {"a": A})
    assert is_stale(evidence(SHAPE, A, suite=SUITE - 1), {"a": A})
    assert is_stale(evidence(SHAPE, A), {"a": replace(A, source_digest="changed")})
    assert is_stale(evidence(SHAPE, A), {})


def test_readers_without_a_catalog_choose_a_products_path_as_a_server_does() -> None:
    """The catalog's order decides, among rows that no path's limits refuse."""
    places = {it.name: place for place, it in enumerate(LINEAR_PATHS)}
    for file in sorted(MATRICES.glob("*/*.json")):
        of_shape: dict[LinearShape, list[Evidence]] = {}
        for entry in load_matrix(file).evidence.values():
            if isinstance(entry.shape, LinearShape) and entry.is_proven and entry.path in places:
                assert not LINEAR_PATHS[places[entry.path]].limits.rejections(entry.shape), (file.name, entry.shape)
                of_shape.setdefault(entry.shape, []).append(entry)
        for shape, entries in of_shape.items():
            chosen = choice_of(entries)
            assert chosen is not None
            assert chosen.path == min((it.path for it in entries), key=places.__getitem__), (file.name, shape)


def test_no_committed_row_is_stale_without_being_named() -> None:
    paths = {it.name: it for it in ALL_PATHS}
    num_stale = Counter[str]()
    for file in sorted(MATRICES.glob("*/*.json")):
        num_stale[file.parent.name] += sum(is_stale(entry, paths) for entry in load_matrix(file).evidence.values())
    pending = set(re.findall(r"^- ([\w-]+): \S", (MATRICES / "PENDING.md").read_text(), re.MULTILINE))
    assert {gpu for gpu, count in num_stale.items() if count} == pending
