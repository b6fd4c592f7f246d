"""deploy/systemd/hallmark.service: settings that exist, and an end that a drain fits into."""

import shlex
import shutil
import subprocess
from pathlib import Path

from server.settings import Settings, flag_of, read_settings

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "hallmark.service"


def service() -> dict[str, list[str]]:
    """The values of each key of the section Service, in their order."""
    found: dict[str, list[str]] = {}
    text = UNIT.read_text().partition("[Service]")[2].partition("[Install]")[0]
    for line in text.splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_its_variables_and_flags_are_settings(tmp_path: Path) -> None:
    environ = dict(word.split("=", 1) for line in service()["Environment"] for word in shlex.split(line))
    config = tmp_path / "server.toml"
    config.touch()
    assert environ["HALLMARK_CONFIG"] == "/etc/hallmark/server.toml"
    settings = read_settings({}, environ | {"HALLMARK_CONFIG": str(config)})
    assert settings.cache_dir == "%C/hallmark/evidence"
    [command] = service()["ExecStart"]
    flags = {word for word in command.split() if word.startswith("--")}
    assert flags <= {flag_of(name) for name in Settings.__struct_fields__}


def test_a_drain_ends_before_systemd_kills() -> None:
    [limit] = service()["TimeoutStopSec"]
    assert float(limit) > Settings().shutdown_grace_s + 10
    assert service()["KillMode"] == ["mixed"], "a signal to the engine too would end streams"


def test_a_start_that_can_never_be_is_not_repeated() -> None:
    assert service()["Restart"] == ["on-failure"]
    assert service()["RestartPreventExitStatus"] == ["2"]


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    program = shutil.which("true")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/hallmark/bin/hallmark", str(program)))
    if (verify := shutil.which("systemd-analyze")) is None:
        return  # containers are without it, and the tests above read the same file
    done = subprocess.run([verify, "verify", str(copy)], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
