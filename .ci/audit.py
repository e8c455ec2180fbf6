"""Look up the pinned packages in a database of known vulnerabilities, with pip-audit.

    make audit

Exit code 1: a package has a known vulnerability. Exit code 2: packages could not be looked up.
"""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    files = sorted((ROOT / "requirements").glob("*.txt"))
    rows = [row for file in files for row in audit(sys.argv[1], file)]
    found = [row for row in rows if row.get("vulns")]
    skipped = [row["name"] for row in rows if "skip_reason" in row]
    for row in found:
        for known in row["vulns"]:
            fixed = ", ".join(known["fix_versions"]) or "no version"
            print(f"{row['name']} {row['version']}: {known['id']}, fixed in {fixed}")
    print(f"{len(rows)} packages: {len(found)} with known vulnerabilities, ", end="")
    print(f"{len(skipped)} not looked up")
    if skipped:
        print("make audit: the database cannot be reached or does not know:", *skipped[:5], "...")
    return 1 if found else 2 if skipped else 0


def audit(command: str, file: Path) -> list[dict[str, object]]:
    """Return one row per package of the file."""
    options = ["--requirement", str(file), "--disable-pip", "--require-hashes", "--format", "json"]
    done = subprocess.run(
        [command, *options, "--progress-spinner", "off"], capture_output=True, text=True
    )
    if not done.stdout:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        sys.exit(f"make audit: nothing was looked up in {file.name}: {last}")
    rows: list[dict[str, object]] = json.loads(done.stdout)["dependencies"]
    return rows


if __name__ == "__main__":
    sys.exit(main())
