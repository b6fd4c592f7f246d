"""Write the bill of materials (CycloneDX 1.6, JSON) of an image's root file system.

It has Python's packages, Debian's, and the scripts of others that our pages carry.

    python deploy/sbom.py "$(buildah mount CONTAINER)" --out sbom.json     # or any folder that an image is unpacked in

Needs cyclonedx-py (PyPI cyclonedx-bom).
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from email.parser import Parser
from pathlib import Path
from typing import Any
from urllib.parse import quote

PREFIX = "opt/hallmark"  # where the Dockerfile installs


def python_packages(site_packages: Path, program: str) -> dict[str, Any]:
    """Return cyclonedx-py's bill of a folder of installed packages, whichever interpreter it is of."""
    with tempfile.TemporaryDirectory() as folder:
        # cyclonedx-py asks an interpreter for its path: one that has nothing of its own, with the image's folder on it.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        [own] = Path(folder).glob("lib/python*/site-packages")
        (own / "image.pth").write_text(f"{site_packages}\n")
        command = [program, "environment", folder, "--output-reproducible", "--spec-version", "1.6", "--of", "JSON"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    bill: dict[str, Any] = json.loads(text)
    return bill


def vendored_scripts(site_packages: Path) -> list[dict[str, Any]]:
    """Return a component for each script of npm's in a folder `vendored` of ours, by the name and version in its head.

    Raises ValueError where a script names none.
    """
    found = []
    for script in sorted(site_packages.glob("hallmark/**/vendored/*.js")):
        head = re.search(r"^ \* ([\w@/.-]+) v(\d[\w.-]*)", script.read_text("utf-8")[:2000], re.MULTILINE)
        if head is None:
            raise ValueError(f"{script} does not begin with a comment that names it and its version")
        name, version = head.groups()
        reference = f"pkg:npm/{quote(name)}@{version}"
        found.append({"type": "library", "bom-ref": f"npm:{name}", "name": name, "version": version, "purl": reference})
    return found


def debian_packages(root: Path) -> list[dict[str, str]]:
    """Return a component for each package that dpkg has installed."""
    entries = (root / "var/lib/dpkg/status").read_text().strip().split("\n\n")
    found = [Parser().parsestr(entry) for entry in entries]
    return [
        {
            "type": "library",
            "bom-ref": f"deb:{it['Package']}",
            "name": it["Package"],
            "version": it["Version"],
            "purl": f"pkg:deb/debian/{it['Package']}@{quote(it['Version'], safe='')}?arch={it['Architecture']}",
        }
        for it in found
        if it["Status"] == "install ok installed"
    ]


def bill_of(root: Path, program: str) -> dict[str, Any]:
    """Return the bill of a root file system. Raises ValueError when the server's packages are not where they belong."""
    folders = list(root.glob(f"{PREFIX}/lib/python*/site-packages"))
    if len(folders) != 1:
        raise ValueError(
            f"{root}/{PREFIX} holds {len(folders)} folders of packages, not 1: is it an image of Hallmark?"
        )
    bill = python_packages(folders[0], program)
    bill["components"] += [*vendored_scripts(folders[0]), *debian_packages(root)]
    return bill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the image's root file system")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--program", default="cyclonedx-py", help="default: %(default)s")
    arguments = parser.parse_args()
    bill = bill_of(arguments.root.resolve(), arguments.program)
    arguments.out.write_text(json.dumps(bill, indent=1) + "\n")
    print(f"{len(bill['components'])} components in {arguments.out}")


if __name__ == "__main__":
    main()
