"""Results of `hallmark bench serve` as a file, so that servers which do not fit beside each other can be compared."""

from pathlib import Path

import msgspec

from qualification.load.served import ServedSide, ServeFile, ServePlan

SCHEMA = 1


class ServeFileError(ValueError):
    """The file cannot be compared with; one line."""


def load_side(path: Path, name: str, plan: ServePlan) -> ServedSide:
    """The side called `name` of a file, or its only one under that name. Raises ServeFileError."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=ServeFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ServeFileError(f"{path} cannot be used: {error}") from error
    if file.schema != SCHEMA:
        raise ServeFileError(f"{path} has schema {file.schema}, this version reads {SCHEMA}")
    changed = [
        f"{field} {getattr(file.plan, field)} against {getattr(plan, field)}"
        for field in ServePlan.__struct_fields__
        if field != "scenarios" and getattr(file.plan, field) != getattr(plan, field)
    ]
    if changed:
        raise ServeFileError(f"{path} was measured under another load: {'; '.join(changed)}")
    sides = [side for side in file.sides if side.name == name] or (file.sides if len(file.sides) == 1 else [])
    if not sides:
        raise ServeFileError(f"{path} has no side {name!r}: {', '.join(side.name for side in file.sides)}")
    return msgspec.structs.replace(sides[0], name=name)


def save(path: Path, file: ServeFile) -> None:
    """Lists of samples stay on one line each."""
    path.write_text(msgspec.json.encode(file).decode().replace('{"case"', '\n{"case"') + "\n", encoding="utf-8")
