"""Settings from flags, variables, the file of `--config` and `.env`."""

from pathlib import Path

import msgspec
import pytest

from qualification.decision.decision import Policy
from server.errors import SettingsError
from server.setting_files import EnvFile, read_env_file
from server.settings import (
    PREFIX,
    CacheDtype,
    DeviceChoice,
    DtypeChoice,
    GenerationConfig,
    LoadFormat,
    Settings,
    read_settings,
)


def test_a_variable_sets_the_field_of_its_name() -> None:
    settings = read_settings({}, {"HALLMARK_ON_UNPROVEN": "refuse", "HALLMARK_MAX_MODEL_LEN": "128", "PATH": "/bin"})
    assert settings == Settings(on_unproven=Policy.REFUSE, max_model_len=128)


def test_a_flag_wins_over_its_variable() -> None:
    assert read_settings({"device": "cpu"}, {"HALLMARK_DEVICE": "cuda"}).device is DeviceChoice.CPU


@pytest.mark.parametrize("name", ["bfloat16", "bf16"])
def test_a_dtype_may_have_torchs_name(name: str) -> None:
    settings = read_settings({"dtype": name}, {"HALLMARK_KV_CACHE_DTYPE": "half"})
    assert (settings.dtype, settings.kv_cache_dtype) == (DtypeChoice.BF16, CacheDtype.FP16)


def test_values_of_vllms_flags_mean_the_same() -> None:
    found = read_settings({"generation_config": "vllm", "load_format": "safetensors"}, {})
    assert (found.generation_config, found.load_format) == (GenerationConfig.NONE, LoadFormat.AUTO)


def test_a_switch_is_turned_off_by_flag_or_variable() -> None:
    assert Settings().cuda_graphs
    assert not read_settings({"cuda_graphs": "false"}, {}).cuda_graphs
    assert not read_settings({}, {"HALLMARK_CUDA_GRAPHS": "0"}).cuda_graphs


@pytest.mark.parametrize(
    ("field", "text", "wanted"),
    [
        ("port", "abc", "Expected `int`"),
        ("port", "70000", "<= 65535"),
        ("port", "tcp://10.0.0.7:8000", "Expected `int`"),  # what Kubernetes injects for a Service named hallmark
        ("device", "tpu", "one of auto, cuda, cpu"),
        ("gpu_memory_utilization", "nan", "> 0.0"),
        ("gpu_memory_utilization", "1.1", "<= 1.0"),
        ("max_model_len", "0", ">= 1"),
        ("request_timeout_s", "0", "> 0.0"),  # 0 is no limit elsewhere; here it would end every request
        ("receive_timeout_s", "0", "> 0.0"),
        ("max_model_len", "many", "Expected `int`,"),
        ("max_queued_bytes", str(2**63), f"<= {2**63 - 1}"),  # more could not be told to the engine
        ("seed", str(2**63), f"<= {2**63 - 1}"),
        ("model", "/models/\udcff", "Expected UTF-8"),  # a byte of a path in another encoding
        ("port", "\udcff", "Expected UTF-8"),
        ("seed", str(-(2**63) - 1), f">= {-(2**63)}"),
    ],
)
def test_an_unusable_value_is_refused_with_source_and_limit(field: str, text: str, wanted: str) -> None:
    with pytest.raises(SettingsError) as by_flag:
        read_settings({field: text}, {})
    with pytest.raises(SettingsError) as by_variable:
        read_settings({}, {f"HALLMARK_{field.upper()}": text})
    assert by_flag.value.message.startswith("--" + field.replace("_", "-"))
    assert by_variable.value.message.startswith(f"HALLMARK_{field.upper()}: ")
    for error in (by_flag, by_variable):
        assert wanted in error.value.message
        assert error.value.message.endswith(f"got {text!r}")
        assert "\n" not in error.value.message


@pytest.mark.parametrize("field", ["host", "cache_dir", "api_key_file", "port", "seed"])
def test_an_empty_value_is_refused(field: str) -> None:
    with pytest.raises(SettingsError, match=rf"^HALLMARK_{field.upper()} is empty"):
        read_settings({}, {f"HALLMARK_{field.upper()}": ""})


def test_an_unknown_variable_is_refused_and_the_closest_named() -> None:
    with pytest.raises(SettingsError, match=r"HALLMARK_PROT is no setting; did you mean HALLMARK_PORT\?"):
        read_settings({}, {"HALLMARK_PROT": "1"})
    for name in ("HALLMARK_port", "hallmark_port", "Hallmark_Port"):
        with pytest.raises(SettingsError, match=rf"{name} is no setting; did you mean HALLMARK_PORT\?"):
            read_settings({}, {name: "1"})


def test_settings_cross_the_socket_unchanged() -> None:
    settings = Settings(model="folder", on_unproven=Policy.DEGRADE, admin_port=9000)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=Settings) == settings


def test_the_model_is_named_after_its_folder_by_default() -> None:
    assert Settings(model="/models/llama").model_name == "llama"
    assert Settings(model="/models/llama", served_model_name="mine").model_name == "mine"
    assert Settings(served_model_name="org/a, b,b").model_names == ("org/a", "b")
    assert Settings(served_model_name="org/a,b").model_name == "org/a"
    assert Settings(model=".").model_name == Path.cwd().name


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
        ("a.yaml", "port: 1\nseed: 2\nport: 3\n", "a.yaml: port is set twice"),
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
