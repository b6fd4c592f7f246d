"""Triton's cache on disk, apart for each content of this package.

The key of an entry lacks what a kernel takes as attributes of a module and the code of a constexpr's properties (Triton
3.6.0), so an entry may be of other sources than those that ask for it. A folder for each content cannot mix them up.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path

_KERNELS = Path(__file__).parent.parent


def use_own_cache(sources: Path = _KERNELS) -> None:
    """Let this process and those that it starts keep compiled kernels in a folder of Triton's cache of its own.

    The folder is named by the digest of `sources`. A second call changes nothing; without Triton nothing happens.
    """
    if find_spec("triton") is None:
        return
    import triton

    name = f"kernels-{content_digest(sources)[:16]}"
    folder = Path(triton.knobs.cache.dir)
    if folder.name != name:
        triton.knobs.cache.dir = str(folder / name)  # Triton writes it to the environment, for child processes


def content_digest(folder: Path) -> str:
    """Return the sha256, as 64 hex digits, of the names and bytes of every Python file below a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
