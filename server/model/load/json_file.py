"""JSON files of a model's folder."""

import json
from pathlib import Path
from typing import Any

from qualification.common.regular_file import read_regular
from server.errors import ModelError


def read_json(path: Path) -> Any:
    """Return what a file holds. Raises ModelError for one that cannot be read, or is no JSON."""
    try:
        text = read_regular(path).decode("utf-8")
        content = json.loads(text)
        if "\\ud" in text.lower():  # half of a pair is no text, and no library takes it later
            json.dumps(content, ensure_ascii=False).encode("utf-8")
        return content
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return what a file holds. Raises ModelError as `read_json`, and for what is no object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must hold a JSON object")
    return content
