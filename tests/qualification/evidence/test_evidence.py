"""Evidence that is proof or none, and which of several rows of a shape and path counts."""

import math
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from kernels.collective.shape import CollectiveShape, Follows
from kernels.vocabulary.buckets import Bucket
from kernels.vocabulary.row_buckets import TokenRows
from kernels.vocabulary.shape import Dtype
from kernels.vocabulary.value_shape import Indexer, Values, with_values
from qualification.evidence.evidence import CHECK_LIMITS, SUITE, Check, required_checks, strain, summarize
from qualification.evidence.ledger import Ledger, Target
from qualification.evidence.matrix import load_matrix, save_matrix
from support.qualification_fakes import DECODE, MACHINE, SHAPE, checks, evidence, path

PATH = path("a")
PROOF = evidence(SHAPE, PATH)


def test_evidence_that_passes_every_required_check_is_proof() -> None:
    assert PROOF.is_proven


@pytest.mark.parametrize("name", sorted(required_checks(SHAPE)))
def test_without_any_one_required_check_it_is_no_proof(name: str) -> None:
    assert not replace(PROOF, checks=checks(missing=name)).is_proven


def test_each_check_is_required_of_some_operator() -> None:
    sums = CollectiveShape(Dtype.BF16, 64, 2, Follows.NOTHING, TokenRows.LE_16)
    assert required_checks(sums) - required_checks(SHAPE) == {"unequal_ranks"}
    chosen = with_values(SHAPE, Values(64, True, Indexer(24)))
    assert required_checks(chosen) - required_checks(SHAPE) == {"choice"}
    assert required_checks(sums) | required_checks(chosen) == CHECK_LIMITS.keys()


@pytest.mark.parametrize("measured", [1.0001, math.nan, math.inf])
def test_check_beyond_limit_or_nan_is_no_proof(measured: float) -> None:
    bad = Check("max_error", "long", measured, 1.0, "abs", 0)
    assert not replace(PROOF, checks=(*checks(missing="max_error"), bad)).is_proven


def test_a_check_on_its_limit_passes() -> None:
    assert replace(PROOF, checks=checks(1.0)).is_proven


def test_path_that_raised_is_not_proven() -> None:
    assert not replace(PROOF, failure="RuntimeError: no").is_proven


@pytest.mark.parametrize("tokens", [128, 513])
def test_lengths_outside_the_bucket_prove_nothing_of_it(tokens: int) -> None:
    shape = replace(SHAPE, query_bucket=Bucket.LE_512, context_bucket=Bucket.LE_512)
    assert not evidence(shape, PATH, tested_context_tokens=tokens).is_proven
    assert not evidence(shape, PATH, tested_query_tokens=tokens).is_proven
    assert evidence(shape, PATH, tested_context_tokens=512, tested_query_tokens=512).is_proven


def test_what_has_changed_is_named() -> None:
    machine = replace(MACHINE, torch="2.14.0", driver="580.1")
    kernel = replace(PATH, source_digest="another")
    assert replace(PROOF, suite=SUITE - 1).differing_fields(kernel, machine) == (
        "driver",
        "torch",
        "source_digest",
        "suite",
    )
    assert PROOF.differing_fields(PATH, MACHINE) == ()


def test_strain_is_the_share_of_the_limit() -> None:
    assert strain(1.0, 2.0) == 0.5
    assert strain(0, 0) == 0
    assert strain(1, 0) == math.inf
    assert strain(math.nan, 1) == math.inf


def test_the_summary_shows_the_check_nearest_to_its_limit() -> None:
    worst = Check("max_error", "long", 0.9, 1.0, "abs", 4)
    summary = summarize(replace(PROOF, checks=(*checks(missing="max_error"), worst)))
    assert summary["worst_check"] == "max_error"
    assert summary["worst_case"] == "long"
    assert summary["worst_measured"] == 0.9
    assert summary["p50_us"] == 10.0
    assert summary["is_proven"] is True


EARLY, LATE = "2026-11-20T12:00:00+00:00", "2026-11-21T12:00:00+00:00"
ENTRIES = {
    "early proof": evidence(SHAPE, PATH, at=EARLY),
    "late proof": evidence(SHAPE, PATH, at=LATE),
    "early failure": evidence(SHAPE, PATH, at=EARLY, failure="RuntimeError: no"),
    "late failure": evidence(SHAPE, PATH, at=LATE, failure="RuntimeError: no"),
}
ORDER = ["late failure", "early failure", "late proof", "early proof"]  # what counts most


@pytest.mark.parametrize(("first", "second"), [*permutations(ENTRIES, 2)])
def test_a_failure_outweighs_proof_and_then_the_later_counts(first: str, second: str, tmp_path: Path) -> None:
    targets = [Target(name, tmp_path / f"{name}.json", (SHAPE, DECODE)) for name in ("one", "two")]
    for target, name in zip(targets, (first, second), strict=True):
        save_matrix(target.file, [ENTRIES[name]])
    ledger = Ledger(targets, catalog=[PATH], fingerprint=MACHINE)
    counts = ENTRIES[min(first, second, key=ORDER.index)]
    assert ledger.known == {(SHAPE, "a"): counts}
    assert [ledger.evidence_of(target) for target in targets] == [[counts]] * 2
    assert [[*load_matrix(target.file).evidence.values()] for target in targets] == [[counts]] * 2  # and on disk


def test_a_file_beside_the_targets_serves_them_and_stays_as_it_is(tmp_path: Path) -> None:
    target, beside = Target("one-fp8", tmp_path / "one-fp8.json", (SHAPE,)), tmp_path / "one.json"
    own, other = evidence(SHAPE, PATH, at=EARLY), evidence(DECODE, PATH, at=EARLY)
    save_matrix(beside, [own, other])
    before = beside.read_bytes()
    Ledger([target], catalog=[PATH], fingerprint=MACHINE, beside=[beside, tmp_path / "none.json"])
    assert [*load_matrix(target.file).evidence.values()] == [own]
    assert beside.read_bytes() == before


def test_evidence_of_a_source_that_has_changed_counts_nothing(tmp_path: Path) -> None:
    target = Target("one", tmp_path / "one.json", (SHAPE,))
    save_matrix(target.file, [evidence(SHAPE, PATH, source_digest="another")])
    assert Ledger([target], catalog=[PATH], fingerprint=MACHINE).known == {}
