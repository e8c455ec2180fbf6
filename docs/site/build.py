"""Build the documentation as a site that needs no network: `make docs`.

    python docs/site/build.py build/site

Pages are taken as they stand in the repository, with every file that they link to; Sphinx turns
them into HTML with a search of its own. A link that leads nowhere, a page that nobody reaches and a
page that would load something from elsewhere are errors.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path

import notebook

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("CHANGELOG.md", "SECURITY.md", "examples/README.md", "benchmarks/README.md")
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?[^)]*\))")
LOADED = re.compile(
    r"""(?:<(?:script|img|link|iframe)[^>]*?(?:src|href)=|url\(|@import )["']?(?:https?:)?//"""
)
ALLOWED = re.compile(r'<link[^>]*rel="(?:canonical|search|index|next|prev)"')
GROUPS = {
    "Begin": ["docs/tutorial", "docs/demo", "docs/commands", "docs/results", "docs/comparison"],
    "Use it": [
        *("docs/layer", "docs/cost", "docs/seam", "docs/data-plane", "docs/gpus"),
        "docs/with-ddp-fsdp-dcp",
        *("docs/metrics", "docs/traces", "docs/view", "docs/inspect", "docs/serving"),
        *("docs/simulator", "docs/troubleshooting"),
    ],
    "Frameworks": [],  # all pages of docs/integrations
    "How it works": ["docs/story", "docs/plan", "docs/numerics", "docs/control-plane"],
    "Reference": ["api", "docs/policies", "docs/glossary", "docs/README"],
    "The project": [],  # all others
}
MODULES = {
    "ultraep": "the package: planning, layers, balancers",
    "ultraep.metrics": "figures of a run",
    "ultraep.workload": "loads, drawn and read",
    "ultraep.trace": "recorded runs",
    "ultraep.parallel": "beside DDP, FSDP2 and DCP",
    "ultraep.integrations.transformers": "models of Hugging Face",
}


def stage(into: Path) -> None:
    """All pages, and the files that they link to, under the same paths."""
    pages = [*(ROOT / name for name in OTHERS), *sorted((ROOT / "docs").rglob("*.md"))]
    put(into / "index.md", ROOT / "README.md", into)
    for page in pages:
        put(into / page.relative_to(ROOT), page, into)
    tutorial = ROOT / "docs/tutorial.ipynb"
    text = "[The notebook](tutorial.ipynb) to run it yourself.\n"
    (into / "docs/tutorial.md").write_text(f"{notebook.page(notebook.read(tutorial))}\n{text}")
    shutil.copy(tutorial, into / "docs")
    shutil.copytree(ROOT / "docs/pictures", into / "docs/pictures", dirs_exist_ok=True)
    (into / "api.md").write_text(reference())
    index = into / "index.md"
    index.write_text(index.read_text() + contents(into))


def put(target: Path, source: Path, into: Path) -> None:
    """A page, with links to the README of the root made links to the first page."""
    target.parent.mkdir(parents=True, exist_ok=True)

    def found(match: re.Match[str]) -> str:
        name = match[2]
        if re.match(r"\w+:", name):
            return match[0]
        path = (source.parent / name).resolve()
        if path == ROOT / "README.md":
            name = name.removesuffix("README.md") + "index.md"
        elif path.name == "tutorial.ipynb":
            name = name.removesuffix("ipynb") + "md"
        elif path.is_file() and path.suffix != ".md":
            copy = into / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        return f"{match[1]}{name}{match[3]}"

    target.write_text(LINK.sub(found, source.read_text()))


def reference() -> str:
    """The page of names, from their docstrings; each of them once."""
    parts = ["# Reference\n\nWhat is public, from the docstrings of the sources.\n"]
    seen: set[int] = set()
    for module, what in MODULES.items():
        found = importlib.import_module(module)
        parts.append(f"## {module}: {what}\n")
        parts.append(f"```{{eval-rst}}\n.. automodule:: {module}\n   :no-members:\n")
        for name in found.__all__:
            named = getattr(found, name)
            if id(named) not in seen and not inspect.ismodule(named) and name[0] != "_":
                parts.append(f".. auto{kind(named)}:: {module}.{name}\n")
                seen.add(id(named))
        parts.append("```\n")
    return "\n".join(parts)


def kind(named: object) -> str:
    """What Sphinx calls it."""
    if inspect.isclass(named):
        return "exception" if issubclass(named, Exception) else "class"
    return "function" if callable(named) else "data"


def contents(into: Path) -> str:
    """The tree of all pages; one that is in no group comes last."""
    pages = {str(p.relative_to(into).with_suffix("")) for p in into.rglob("*.md")} - {"index"}
    named = {page for group in GROUPS.values() for page in group}
    frameworks = sorted(page for page in pages - named if page.startswith("docs/integrations/"))
    rest = sorted(pages - named - set(frameworks))
    parts = []
    for title, group in GROUPS.items():
        found = {"Frameworks": frameworks, "The project": rest}.get(title, group)
        options = f":hidden:\n:caption: {title}\n"
        parts.append(f"```{{toctree}}\n{options}\n" + "\n".join(found) + "\n```\n")
    return "\n" + "\n".join(parts)


def loads_from_elsewhere(site: Path) -> list[str]:
    """Pages, styles and scripts that fetch something when they are opened."""
    found = []
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        for match in LOADED.finditer(path.read_text()):
            if not ALLOWED.match(match[0]):
                found.append(f"{path.relative_to(site)}: {match[0]}")
    return found


def main() -> None:
    from sphinx.cmd.build import build_main

    site = Path(sys.argv[1]).resolve()
    staged = site.with_name(f"{site.name}-pages")
    for folder in (site, staged):
        shutil.rmtree(folder, ignore_errors=True)
    stage(staged)
    here = str(Path(__file__).parent)
    options = ["-W", "--keep-going", "-q", "-b", "html", "-c", here, "-d", f"{staged}-work"]
    if build_main([*options, str(staged), str(site)]):
        raise SystemExit("make docs: there are warnings above")
    if found := loads_from_elsewhere(site):
        raise SystemExit("\n".join(["these are loaded from elsewhere:", *found]))
    print(f"{len(list(site.rglob('*.html')))} pages: {site / 'index.html'}")


if __name__ == "__main__":
    main()
