"""Print the rooms, floors and arrows of each folder that docs/architecture.md draws.

.venv/bin/python docs/house.py

A room of a folder is a file or a folder in it, an arrow an import between two rooms, and a room's floor is one above
the highest that it imports. Imports inside functions count; `__init__` files do not.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("kernels", "qualification", "server", "bench")

Imports = Mapping[str, set[str]]  # module -> dotted names that it imports


def imports_of(root: Path) -> Imports:
    files = [path for layer in LAYERS for path in sorted((root / layer).rglob("*.py")) if path.name != "__init__.py"]
    return {".".join(path.relative_to(root).with_suffix("").parts): set(_imported(path)) for path in files}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def count(folder: str, imports: Imports) -> tuple[int, int, int]:
    """Return how many rooms, floors and arrows a folder (dotted) has. Raises ValueError for rooms in a circle."""
    arrows: dict[str, set[str]] = {}
    for module, names in imports.items():
        room = _room(folder, module)
        if room is not None:
            others = {_room(folder, name) for name in names & imports.keys()} - {None, room}
            arrows.setdefault(room, set()).update(other for other in others if other is not None)
    floors: dict[str, int] = {}
    while len(floors) < len(arrows):
        ready = {room for room in arrows.keys() - floors.keys() if arrows[room] <= floors.keys()}
        if not ready:
            raise ValueError(f"{folder} has a circle among {sorted(arrows.keys() - floors.keys())}")
        floors |= {room: 1 + max((floors[other] for other in arrows[room]), default=0) for room in ready}
    return len(arrows), max(floors.values(), default=0), sum(map(len, arrows.values()))


def _room(folder: str, module: str) -> str | None:
    """Return the room of a folder in which a module lies; None outside of it."""
    return module.removeprefix(f"{folder}.").split(".")[0] if module.startswith(f"{folder}.") else None


def table(imports: Imports) -> str:
    """Return a row for each folder of five rooms or more."""
    parts = [module.split(".")[:-1] for module in imports]
    folders = sorted({".".join(part[:depth]) for part in parts for depth in range(1, len(part) + 1)})
    rows = [(folder.replace(".", "/"), *count(folder, imports)) for folder in folders]
    lines = [f"| `{folder}/` | {rooms} / {floors} / {arrows} |" for folder, rooms, floors, arrows in rows if rooms >= 5]
    return "\n".join(["| folder | rooms / floors / arrows |", "| --- | --- |", *lines])


if __name__ == "__main__":
    print(table(imports_of(ROOT)))
