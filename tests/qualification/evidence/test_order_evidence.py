"""The check of an order in verdicts, tables, comparisons and in what a run measures again."""

from dataclasses import replace

from kernels.vocabulary.path import KernelPath
from kernels.vocabulary.shape import AttentionShape
from qualification.common.exit_code import ExitCode
from qualification.evidence.evidence import ORDER_SUITE, Evidence, Invariance
from qualification.evidence.ledger import missing_of
from qualification.evidence.summary import counts, order_text, summary
from qualification.evidence.verdicts import Harm, Side, differences, judge
from support.qualification_fakes import DECODE, MACHINE, SHAPE, evidence, path

ONE, TWO = (replace(path(name), order="keys512") for name in ("one", "two"))
PATHS = (ONE, TWO, path("plain"))
HOLDS = Invariance("keys512", 640, 0, (("92 tokens", "aaaa"), ("460 tokens", "bbbb")))
BREAKS = replace(HOLDS, changed=3, where="9 rows, pool: 3 values of row 4 of the input '92 tokens'")
OTHER = replace(HOLDS, digests=(("92 tokens", "aaaa"), ("460 tokens", "cccc")))
OLDER = replace(HOLDS, suite=ORDER_SUITE - 1)


def proof(shape: AttentionShape, of: KernelPath, seen: Invariance | None = HOLDS) -> Evidence:
    return evidence(shape, of, invariance=seen if of.order else None)


def known(**of_two: Invariance | None) -> dict:
    """Evidence of every path and shape; that of path `two` in decode as given."""
    entries = [proof(shape, of) for shape in (SHAPE, DECODE) for of in PATHS]
    entries = [replace(it, **of_two) if (it.shape, it.path) == (DECODE, "two") else it for it in entries]
    return {(it.shape, it.path): it for it in entries}


def test_a_run_fails_by_a_path_that_breaks_its_order() -> None:
    for seen, words in ((BREAKS, "3 of 640 values change with the batch"), (OTHER, "other bits than one on the input")):
        [finding] = judge((SHAPE, DECODE), known(invariance=seen), paths=PATHS, fingerprint=MACHINE)
        assert (finding.code, finding.shape) == (ExitCode.NUMERICS, DECODE)
        assert words in finding.detail
    assert judge((SHAPE, DECODE), known(), paths=PATHS, fingerprint=MACHINE) == []


def test_a_proof_without_the_check_of_its_order_is_measured() -> None:
    for seen in (None, OLDER, replace(HOLDS, order="keys256")):
        missing = missing_of((SHAPE, DECODE), known(invariance=seen), paths=PATHS, fingerprint=MACHINE)
        assert missing == [(DECODE, TWO)]
    assert missing_of((SHAPE, DECODE), known(invariance=BREAKS), paths=PATHS, fingerprint=MACHINE) == []


def test_tables_say_which_order_was_kept() -> None:
    texts = [order_text(proof(SHAPE, ONE, seen)) for seen in (HOLDS, BREAKS, OLDER, None)]
    assert texts == ["keys512", "keys512 broken", "keys512 (older check)", "-"]
    lines = summary(known(invariance=BREAKS).values())
    [broken] = [line for line in lines if "keys512 broken" in line]
    assert "two" in broken
    assert counts(known(invariance=BREAKS).values()).endswith("6 proven, 3 of 4 keep their order")


def test_a_lost_order_is_a_difference() -> None:
    before, after = ({(SHAPE, "one"): proof(SHAPE, ONE, seen)} for seen in (HOLDS, BREAKS))
    [lost] = differences(Side(before), Side(after))
    assert (lost.harm, lost.details) == (Harm.STATUS, ("order keys512 -> keys512 broken",))
    [gained] = differences(Side(after), Side(before))
    assert gained.harm is Harm.BETTER
