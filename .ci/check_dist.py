"""Look into a wheel and an sdist: all that a user needs, and nothing that a machine left behind."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_BEHIND = ("__pycache__", ".pyc", ".pytest_cache", ".mypy_cache", ".venv", "build/", ".git/")
IN_SDIST = ("README.md", "LICENSE", "CHANGELOG.md", "Makefile", "constraints.txt", "tests/cases.py")
IN_SDIST += ("requirements/dev.txt", "docs/reliability.md")
IN_SDIST += (
    "docs/story.md",
    "docs/tutorial.ipynb",
    "examples/pretrain.toml",
    "benchmarks/harness.py",
)


def main() -> None:
    folder = Path(sys.argv[1])
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src").rglob("*")
        if path.is_file() and not any(p.endswith((".egg-info", "__pycache__")) for p in path.parts)
    }
    missing = sorted(sources - packed)
    with tarfile.open(sdist) as archive:
        kept = {name.partition("/")[2] for name in archive.getnames()}
    missing += sorted({*IN_SDIST, *(f"src/{name}" for name in sources)} - kept)
    too_much = [name for name in packed | kept if any(part in name for part in LEFT_BEHIND)]
    too_much += [n for n in packed if not n.startswith(("ultraep/", "ultraep_tools/", "ultraep-"))]
    if missing or too_much:
        raise SystemExit(f"missing: {missing}\ntoo much: {sorted(too_much)}")
    for path in (wheel, sdist):
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
