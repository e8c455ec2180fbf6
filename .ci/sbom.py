"""Write a bill of materials (CycloneDX 1.6, JSON) of the installed package and all it requires.

    python .ci/sbom.py dist/ultraep-0.3.0.cdx.json

Run it with the Python of an environment that has only the package: every distribution in it is
listed, with its version, license and the distributions that it requires.
"""

import json
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = "ultraep"
NOT_REQUIRED = {"pip"}  # what venv itself installs


def main(path: Path) -> None:
    installed = {key(item.metadata["Name"]): item for item in distributions()}
    for name in NOT_REQUIRED & installed.keys():
        del installed[name]
    root = installed[ROOT]
    components = [component(item) for name, item in sorted(installed.items()) if name != ROOT]
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(root)},
        "components": components,
        "dependencies": [
            {"ref": reference(item), "dependsOn": required(item, installed)}
            for _, item in sorted(installed.items())
        ],
    }
    path.write_text(json.dumps(bill, indent=2) + "\n")
    print(f"{path.name}: {len(components)} packages")


def key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def reference(item: Distribution) -> str:
    return f"pkg:pypi/{key(item.metadata['Name'])}@{item.version.replace('+', '%2B')}"


def component(item: Distribution) -> dict[str, object]:
    """Return the entry of one distribution."""
    entry: dict[str, object] = {
        "type": "library",
        "bom-ref": reference(item),
        "name": key(item.metadata["Name"]),
        "version": item.version,
        "purl": reference(item),
    }
    expression, license_name = (item.metadata.get(n) for n in ("License-Expression", "License"))
    if expression:
        entry["licenses"] = [{"expression": expression}]
    elif license_name and len(license_name) < 80:  # others put the whole text there
        entry["licenses"] = [{"license": {"name": license_name}}]
    return entry


def required(item: Distribution, installed: dict[str, Distribution]) -> list[str]:
    """Return the installed distributions that this one names, except for its extras."""
    lines = [line for line in item.requires or [] if "extra ==" not in line]
    names = {key(re.match(r"[\w.-]+", line)[0]) for line in lines}
    return sorted(reference(installed[name]) for name in names & installed.keys())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
