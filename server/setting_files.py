"""Files of settings: `--config FILE` in TOML or YAML, and variables of a file `.env`. Values stay texts."""

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml
from dotenv.parser import parse_stream

from server.errors import SettingsError

_WITH_COMMAS = frozenset({"served_model_name", "allowed_hosts", "allowed_origins"})  # settings that may be lists
_DECODERS = {".toml": msgspec.toml.decode, ".yaml": msgspec.yaml.decode, ".yml": msgspec.yaml.decode}


@dataclass(frozen=True, slots=True)
class GivenSetting:
    """A setting's value as it was given.

    source  what a person would change: `--port`, `HALLMARK_PORT`, `server.toml: port`
    text    the value as a flag would have it
    """

    source: str
    text: str


@dataclass(frozen=True, slots=True)
class EnvFile:
    """Variables of a file in the format of `.env`."""

    path: Path
    variables: Mapping[str, str]


NO_ENV_FILE = EnvFile(Path(".env"), {})


def read_env_file(path: Path, prefix: str) -> EnvFile:
    """Read the variables with this prefix; none where there is no such file.

    Lines of other programs are not judged. Raises SettingsError for a line that begins with the prefix and sets
    nothing, and for a file that cannot be read.
    """
    if not path.is_file():  # a virtual environment may have this name
        return EnvFile(path, {})
    variables: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8") as stream:
            for binding in parse_stream(stream):
                text = binding.original.string.strip()
                if binding.key is not None and not binding.key.startswith(prefix):
                    continue
                if binding.key is not None and binding.value is not None:
                    variables[binding.key] = binding.value
                elif text.removeprefix("export ").lstrip().startswith(prefix):
                    name = text.removeprefix("export ").split()[0].partition("=")[0]
                    raise SettingsError(f"{path}: line {binding.original.line}: {name}: expected {name}=VALUE")
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 at byte {error.start}") from None
    return EnvFile(path, variables)


def read_config(path: Path, known: Iterable[str]) -> dict[str, GivenSetting]:
    """Return the settings of a TOML or YAML file, whose keys are flags without dashes in front.

    known  names of settings; a key may have `-` for `_`
    Raises SettingsError, which names the file and the key.
    """
    if path.suffix not in _DECODERS:
        raise SettingsError(f"--config {path}: the name must end in {', '.join(_DECODERS)}")
    try:
        given = _DECODERS[path.suffix](path.read_bytes())
    except OSError as error:
        raise SettingsError(f"--config {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: {' '.join(str(error).split())}") from None
    if given is None and path.suffix != ".toml":
        return {}  # a YAML file of comments
    if not isinstance(given, dict):
        raise SettingsError(f"--config {path}: expected settings by name, got {_kind(given)}")
    if path.suffix != ".toml" and (twice := _doubled_key(path)) is not None:
        raise SettingsError(f"{path}: {twice} is set twice")
    names = [name for name in known if name != "config"]
    settings: dict[str, GivenSetting] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise SettingsError(f"{path}: {key} is no setting of a file{hint}")
        if name in settings:
            raise SettingsError(f"{path}: {key} is set twice, with - and with _")
        settings[name] = GivenSetting(f"{path}: {key}", _text(f"{path}: {key}", name, value))
    return settings


def _doubled_key(path: Path) -> str | None:
    """Return a key that a YAML file has twice, of which its reader takes the last; TOML's refuses such a file."""
    node = yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)
    found = Counter(str(key.value) for key, _ in node.value) if isinstance(node, yaml.MappingNode) else Counter()
    return next((key for key, count in found.items() if count > 1), None)


def _text(source: str, name: str, value: Any) -> str:
    if name in _WITH_COMMAS and isinstance(value, list) and value and all(isinstance(it, str) for it in value):
        return ",".join(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise SettingsError(f"{source}: expected a text, a number or a truth value, got {_kind(value)}")


def _kind(value: Any) -> str:
    kinds = {dict: "a table", list: "a list", type(None): "nothing"}
    return kinds.get(type(value), f"a {type(value).__name__}")
