import subprocess
import sys
import sysconfig
from pathlib import Path

from kernels.system.child_process import python_command


def run(*command: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)


def test_a_module_imports_nothing_of_its_current_folder(tmp_path: Path) -> None:
    for name in ("kernels", "random"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    module = "kernels.system.whole_file"  # imports tempfile, which imports random
    assert run(*python_command(module), cwd=tmp_path).returncode == 0
    assert run(sys.executable, "-m", module, cwd=tmp_path).returncode == 9


def test_a_module_is_found_where_this_process_would_find_it(tmp_path: Path) -> None:
    lines = ["import os, sys", "print(__name__, sys.argv[1:], os.environ['MOOD'])", "sys.exit(3)"]
    (tmp_path / "found_here_alone.py").write_text("\n".join(lines))
    sys.path.insert(0, str(tmp_path))
    try:
        command = python_command("found_here_alone", "a b", "--flag", environment=["MOOD=calm"])
    finally:
        sys.path.remove(str(tmp_path))
    found = run(*command, cwd=Path("/"))
    assert (found.stdout, found.returncode) == ("__main__ ['a b', '--flag'] calm\n", 3)


def test_a_module_is_looked_for_in_the_folders_before_ours(tmp_path: Path) -> None:
    folder = tmp_path / "kernels" / "system"
    folder.mkdir(parents=True)
    (folder / "whole_file.py").write_text("raise SystemExit(7)")
    (tmp_path / "kernels" / "__init__.py").touch()
    assert run(*python_command("kernels.system.whole_file", before=[str(tmp_path)]), cwd=Path("/")).returncode == 7
    assert run(*python_command("kernels.system.whole_file"), cwd=Path("/")).returncode == 0


def test_a_child_process_gets_no_foreign_standard_library() -> None:
    command = python_command("kernels.system.whole_file", under=["ncu", "--csv"])
    assert command[0] == "env"
    assert sysconfig.get_path("stdlib") not in command[1].removeprefix("PYTHONPATH=").split(":")
    assert command[2:] == ("ncu", "--csv", sys.executable, "-P", "-m", "kernels.system.whole_file")
