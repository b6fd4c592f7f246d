"""Settings from the file of `--config` and from `.env`."""

from pathlib import Path

import pytest

from server.errors import SettingsError
from server.setting_files import EnvFile, read_env_file
from server.settings import PREFIX, Settings, read_settings


def written(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text)
    return file


def env_file(folder: Path, text: str) -> EnvFile:
    return read_env_file(written(folder, ".env", text), PREFIX)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'port = 8123\nserved-model-name = ["a", "b"]\ncuda_graphs = false\ntrace_ratio = 0.5\nhost="::1"\n'),
        ("a.yaml", "port: 8123\nserved_model_name: [a, b]\ncuda-graphs: no\ntrace-ratio: 0.5\nhost: '::1'\n"),
    ],
)  # fmt: skip
def test_a_file_has_settings_by_name(name: str, text: str, tmp_path: Path) -> None:
    file = str(written(tmp_path, name, text))
    wanted = Settings(config=file, port=8123, served_model_name="a,b", cuda_graphs=False, trace_ratio=0.5, host="::1")
    assert read_settings({"config": file}, {}) == wanted
    assert read_settings({}, {"HALLMARK_CONFIG": file}) == wanted


def test_a_flag_wins_then_a_variable_then_env_file_then_config(tmp_path: Path) -> None:
    file = written(tmp_path, "a.yml", "port: 1\nseed: 1\npage_size: 1\nmax_num_seqs: 1\n")
    lines = env_file(
        tmp_path, f"HALLMARK_CONFIG={file}\nHALLMARK_PORT=2\nHALLMARK_SEED=2\nexport HALLMARK_PAGE_SIZE='2'\n"
    )
    read = read_settings({"port": "4"}, {"HALLMARK_PORT": "3", "HALLMARK_SEED": "3"}, lines)
    assert (read.port, read.seed, read.page_size, read.max_num_seqs) == (4, 3, 2, 1)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("port = 70000", "a.toml: port: Expected `int` <= 65535, got '70000'"),
        ('port = "x"', "a.toml: port: Expected `int`, got 'x'"),
        ('device = "tpu"', "a.toml: device: Expected one of auto, cuda, cpu, got 'tpu'"),
        ('host = ""', "a.toml: host is empty; leave it out for the default"),
        ("max-num-seq = 1", "a.toml: max-num-seq is no setting of a file; did you mean max_num_seqs?"),
        ('config = "b.toml"', "a.toml: config is no setting of a file"),
        ("page-size = 16\npage_size = 16", "a.toml: page_size is set twice, with - and with _"),
        ("[page_size]\na = 1", "a.toml: page_size: expected a text, a number or a truth value, got a table"),
        ("seed = [1]", "a.toml: seed: expected a text, a number or a truth value, got a list"),
        ("seed = 2026-11-29", "a.toml: seed: expected a text, a number or a truth value, got a date"),
        ("port 1", "a.toml: "),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_by_name_and_key(text: str, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as error:
        read_settings({"config": str(written(tmp_path, "a.toml", text))}, {})
    assert wanted in error.value.message
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("a.yaml", "- port", "expected settings by name, got a list"),
        ("a.yaml", "port: [", "--config "),
        ("a.yaml", "port:", "port: expected a text, a number or a truth value, got nothing"),
        ("a.yaml", "a: !!python/object/apply:os.system [ls]", "--config "),
        ("a.json", "{}", "the name must end in .toml, .yaml, .yml"),
    ],
)
def test_a_file_of_another_form_is_refused(name: str, text: str, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=wanted):
        read_settings({"config": str(written(tmp_path, name, text))}, {})


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("HALLMARK_PROT=1", r"\.env: HALLMARK_PROT is no setting; did you mean HALLMARK_PORT\?"),
        ("A=1\nHALLMARK_PORT=x", r"\.env: HALLMARK_PORT: Expected `int`, got 'x'"),
        ("HALLMARK_PORT=", r"\.env: HALLMARK_PORT is empty"),
        ("A=1\nHALLMARK_PORT", r"\.env: line 2: HALLMARK_PORT: expected HALLMARK_PORT=VALUE"),
        ("export HALLMARK_PORT 1", r"\.env: line 1: HALLMARK_PORT: expected HALLMARK_PORT=VALUE"),
    ],
)
def test_a_bad_line_of_an_env_file_is_refused(text: str, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=wanted):
        read_settings({}, {}, env_file(tmp_path, text))


def test_lines_of_other_programs_are_not_judged(tmp_path: Path) -> None:
    text = "# HALLMARK_PORT=1\nOTHER\nSECRET='a\nfunction x() {\nHALLMARK_SEED=7 # of the day\n"
    assert env_file(tmp_path, text).variables == {"HALLMARK_SEED": "7"}
    (tmp_path / "venv" / ".env").mkdir(parents=True)
    assert read_env_file(tmp_path / "venv" / ".env", PREFIX).variables == {}
