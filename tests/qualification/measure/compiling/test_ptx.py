"""`hallmark matrix ptx`: real compilations of few kernels, by copies of our own."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

import kernels
from qualification.measure.compiling.ptx import Collected, differences, normalised
from server.cli.main import main

# A kernel for CPUs under Triton's interpreter has no PTX: the child process must leave it.
pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.sm90]

LENGTHS = "q-le_128 c-le_128 causal"
PAIRS = (
    ("triton.prefill", f"prefill bf16 h2:1 d64 {LENGTHS}"),
    ("triton.decode", f"decode bf16 h2:1 d64 {LENGTHS} page64"),
    ("gluon.decode.hopper", f"decode bf16 h2:1 d64 {LENGTHS} page64"),
)
COMPILED = (
    "\t.loc\t1 34 29                         // a.py:34:29\n$L__tmp3:\n\tmov.u32 \t%r81, %ctaid.z;  // a comment\n"
)
DEBUG = '\t.file\t1 "/a.py"\n\t.section\t.debug_info\n\t{\n.b64 $L__func_end0                      // pc\n\t}\n'


def make_checkout(folder: Path, pairs: tuple[tuple[str, str], ...] = PAIRS) -> Path:
    """A copy of our kernels with a matrix of these pairs."""
    source = Path(kernels.__file__).parent
    shutil.copytree(source, folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    matrix = folder / "qualification" / "matrices" / "gpu" / "model.json"
    matrix.parent.mkdir(parents=True)
    matrix.write_text(json.dumps({"evidence": [{"path": path, "shape": shape} for path, shape in pairs]}))
    return folder


def edit(checkout: Path, file: str, old: str, new: str) -> None:
    path = checkout / "kernels" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags: what is compiled of one content is found by the next who asks for it."""
    return ["--cache-dir", str(tmp_path_factory.mktemp("cache"))]


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory, cache: list[str]) -> Path:
    """Our own kernels' PTX."""
    folder = tmp_path_factory.mktemp("ours")
    assert (
        main(["matrix", "ptx", "collect", str(make_checkout(folder)), "--out", str(folder / "ptx.json"), *cache]) == 0
    )
    return folder / "ptx.json"


def test_comments_and_moved_lines_change_no_ptx(
    collected: Path, cache: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = make_checkout(tmp_path)
    edit(same, "portable/tile.py", "import triton\n", "# A new comment.\n\n\nimport triton\n")
    edit(same, "portable/tile.py", "The running maximum and denominator before any key", "What holds before any key")
    edit(same, "hopper/decode/kernel.py", "gluon import jit\n", "gluon import jit\n\n# A new comment.\n")
    assert main(["matrix", "ptx", "compare", str(collected), str(same), *cache]) == 0
    assert capsys.readouterr().out == "5 -> 5 kernels of 3 pairs: no difference (exit 0)\n"


def test_a_change_names_the_kernels_that_it_changes(
    collected: Path, cache: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = make_checkout(tmp_path)
    infinite = 'largest = tl.full([BLOCK_M], float("-inf"), tl.float32)'
    edit(changed, "portable/tile.py", infinite, "largest = tl.full([BLOCK_M], -3e38, tl.float32)")
    # Triton's key for its cache lacks the code of a constexpr's properties.
    capped = "return self.queries * min(self.members, self.group)"
    edit(changed, "hopper/decode/variants.py", capped, "return self.queries * self.members")
    assert main(["matrix", "ptx", "compare", str(collected), str(changed), *cache]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    kernels_changed = [
        "hallmark_decode",
        "hallmark_decode_combine",
        "hallmark_gluon_decode_combine",
        "hallmark_prefill",
    ]
    assert sorted(line.split("(")[0] for line in lines) == [f"differs  {name}" for name in kernels_changed]
    assert last == "5 -> 5 kernels of 3 pairs: 4 differ, 0 new, 0 gone (exit 1)"


def test_a_kernel_that_does_not_compile_is_no_pass(
    cache: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = make_checkout(tmp_path, PAIRS[1:])
    edit(broken, "portable/decode.py", "kv_head = tl.program_id(1)", "kv_head = no_such_name")
    out = str(tmp_path / "ptx.json")
    assert main(["matrix", "ptx", "collect", str(broken), "--out", out, "--paths", "triton.decode", *cache]) == 3
    failed = capsys.readouterr().out
    assert f"{broken}: triton.decode {PAIRS[1][1]}: CompilationError" in failed
    assert "no_such_name is not defined" in failed


def test_no_pair_is_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(make_checkout(tmp_path))
    assert main(["matrix", "ptx", "compare", place, "--paths", "triton.none"]) == 4
    assert "names such a path: nothing was compiled" in capsys.readouterr().out


def test_a_collected_file_has_its_own_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ptx.json"
    file.write_bytes(msgspec.json.encode(Collected("3.6.0", "12.8", [PAIRS[0]], {"a": "1"}, {})))
    command = ["matrix", "ptx", "compare", str(file), str(shutil.copy(file, tmp_path / "copy.json"))]
    assert main(command) == 0
    assert main([*command, "--limit", "1"]) == 3
    assert capsys.readouterr().err.endswith(f"choose from matrices: {file} has its own list of shapes\n")
    other = tmp_path / "other.json"
    other.write_bytes(msgspec.json.encode(Collected("3.6.0", "12.8", [PAIRS[1]], {"a": "1"}, {})))
    assert main(["matrix", "ptx", "compare", str(file), str(other)]) == 3
    assert "were collected for different pairs" in capsys.readouterr().err


def test_a_checkout_is_not_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = make_checkout(tmp_path / "checkout")
    (tmp_path / "link").symlink_to(place)
    assert main(["matrix", "ptx", "compare", str(place), str(tmp_path / "link")]) == 3
    assert "are the same place: name another checkout" in capsys.readouterr().err


def test_a_checkout_without_kernels_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = make_checkout(tmp_path)
    compare = ["matrix", "ptx", "compare", str(place), "--limit", "1"]
    (place / "kernels" / "vocabulary" / "shape.py").write_text("raise ImportError('no shape')")
    assert main(compare) == 3
    *_, line = capsys.readouterr().err.splitlines()
    assert line == f"hallmark: the kernels of {place} cannot be called from here: ImportError: no shape"
    (place / "kernels" / "__init__.py").unlink()
    assert main(compare) == 3
    assert capsys.readouterr().err == f"hallmark: {place} is no checkout: it has no kernels/__init__.py\n"


def test_only_places_in_sources_are_left_out_of_ptx() -> None:
    assert normalised(COMPILED + DEBUG + "\tret;\n") == "\tmov.u32 \t%r81, %ctaid.z;\n\tret;"
    assert normalised("$L__BB0_2:\n\tbra.uni \t$L__BB0_1;\n") == "$L__BB0_2:\n\tbra.uni \t$L__BB0_1;"


def test_new_and_gone_kernels_are_differences() -> None:
    before, after = (Collected("3.6.0", "12.8", [], {"same": "1", name: "2"}, {}) for name in ("a", "b"))
    assert differences(before, after) == [("gone", "a"), ("new", "b")]
