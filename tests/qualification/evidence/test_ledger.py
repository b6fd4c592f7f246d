"""Evidence of several models' files, of which each shape and path has one that counts."""

from itertools import permutations
from pathlib import Path

import pytest

from qualification.evidence.ledger import Ledger, Target
from qualification.evidence.matrix import load_matrix, save_matrix
from support.qualification_fakes import DECODE, MACHINE, SHAPE, evidence, path

PATH = path("a")
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


def test_evidence_of_a_source_that_has_changed_counts_nothing(tmp_path: Path) -> None:
    target = Target("one", tmp_path / "one.json", (SHAPE,))
    save_matrix(target.file, [evidence(SHAPE, PATH, source_digest="another")])
    assert Ledger([target], catalog=[PATH], fingerprint=MACHINE).known == {}
