"""Settings from flags and variables."""

from pathlib import Path

import msgspec
import pytest

from qualification.decision.decision import Policy
from server.errors import SettingsError
from server.settings import CacheDtype, DeviceChoice, DtypeChoice, Settings, read_settings


def test_a_variable_sets_the_field_of_its_name() -> None:
    settings = read_settings({}, {"HALLMARK_ON_UNPROVEN": "refuse", "HALLMARK_MAX_MODEL_LEN": "128", "PATH": "/bin"})
    assert settings == Settings(on_unproven=Policy.REFUSE, max_model_len=128)


def test_a_flag_wins_over_its_variable() -> None:
    assert read_settings({"device": "cpu"}, {"HALLMARK_DEVICE": "cuda"}).device is DeviceChoice.CPU


@pytest.mark.parametrize("name", ["bfloat16", "bf16"])
def test_a_dtype_may_have_torchs_name(name: str) -> None:
    settings = read_settings({"dtype": name}, {"HALLMARK_KV_CACHE_DTYPE": "half"})
    assert (settings.dtype, settings.kv_cache_dtype) == (DtypeChoice.BF16, CacheDtype.FP16)


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
    with pytest.raises(SettingsError, match="HALLMARK_port is no setting"):
        read_settings({}, {"HALLMARK_port": "1"})


def test_settings_cross_the_socket_unchanged() -> None:
    settings = Settings(model="folder", on_unproven=Policy.DEGRADE, admin_port=9000)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=Settings) == settings


def test_the_model_is_named_after_its_folder_by_default() -> None:
    assert Settings(model="/models/llama").model_name == "llama"
    assert Settings(model="/models/llama", served_model_name="mine").model_name == "mine"
    assert Settings(served_model_name="org/a, b,b").model_names == ("org/a", "b")
    assert Settings(served_model_name="org/a,b").model_name == "org/a"
    assert Settings(model=".").model_name == Path.cwd().name
