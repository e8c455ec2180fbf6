"""Build the documentation as a site that needs no network: `make docs`.

    python docs/site/build.py build/site

Sphinx turns the pages of the repository, and the files that they link to, into HTML. Broken links,
pages without a place in the contents and pages that load something from the network are errors.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path

import notebook
import search

ROOT = Path(__file__).resolve().parents[2]
PAGES_OUTSIDE_DOCS = ("CHANGELOG.md", "SECURITY.md", "examples/README.md", "benchmarks/README.md")
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)\s]*)?[^)]*\))")
LOADED = re.compile(
    r"""(?:<(?:script|img|link|iframe)[^>]*?(?:src|href)=|url\(|@import )["']?(?:https?:)?//"""
)
ALLOWED = re.compile(r'<link[^>]*rel="(?:canonical|search|index|next|prev)"')
FRAMEWORKS, REST = "Frameworks", "Project"
CONTENTS = {
    "Start": [
        *("docs/README", "docs/demo", "docs/tutorial", "docs/commands"),
        *("docs/results", "docs/benchmarks", "docs/comparison", "docs/support-matrix"),
    ],
    FRAMEWORKS: [],  # all pages of docs/integrations
    "Use it": [
        *("docs/layer", "docs/extension-api", "docs/routes", "docs/policies", "docs/cost"),
        *("docs/data-plane", "docs/dispatchers", "docs/clusters", "docs/gpus"),
        *("docs/with-ddp-fsdp-dcp", "docs/reliability", "docs/troubleshooting"),
    ],
    "Look inside": [
        *("docs/inspect", "docs/metrics", "docs/traces", "docs/view", "docs/simulator"),
        *("docs/serving", "docs/soak"),
    ],
    "How it works": ["docs/story", "docs/plan", "docs/numerics", "docs/control-plane"],
    "Reference": ["api/index", "docs/glossary"],
    REST: [],  # all other pages
}
# Pages of the API: title, module, names; no names: all names of the module.
API = {
    "planning": (
        "Planning",
        "ultraep",
        "plan Plan Topology BalanceConfig Rates count_loads backend_names "
        "policy_names register_policy Problem",
    ),
    "layers": (
        "Layers and balancers",
        "ultraep",
        "BalancedMoE Balancer Router Routing Experts ExpertsFrom serve gather_experts "
        "reorder_experts LocalGroup",
    ),
    "errors": (
        "Errors",
        "ultraep",
        "UltraEPError BackendUnavailable CommunicationError ConfigError FileError LoadError "
        "NothingToBalance PlanError PlanMismatch SlotError",
    ),
    "workload": ("Loads, synthetic and recorded", "ultraep.workload", ""),
    "trace": ("Traces", "ultraep.trace", ""),
    "metrics": ("Metrics", "ultraep.metrics", ""),
    "parallel": ("DDP, FSDP2 and DCP", "ultraep.parallel", ""),
    "transformers": ("Transformers models", "ultraep.integrations.transformers", ""),
}


def stage(staged: Path) -> None:
    """Write all pages, and the files that they link to, under the same paths."""
    stage_page(ROOT / "README.md", staged / "index.md", staged)
    for page in [
        *(ROOT / name for name in PAGES_OUTSIDE_DOCS),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]:
        stage_page(page, staged / page.relative_to(ROOT), staged)
    tutorial = ROOT / "docs/tutorial.ipynb"
    download = "Download [the notebook](tutorial.ipynb) to run it yourself.\n"
    (staged / "docs/tutorial.md").write_text(
        f"{notebook.page(notebook.read(tutorial))}\n{download}"
    )
    shutil.copy(tutorial, staged / "docs")
    shutil.copytree(ROOT / "docs/pictures", staged / "docs/pictures", dirs_exist_ok=True)
    stage_api(staged / "api")
    index = staged / "index.md"
    index.write_text(index.read_text() + contents(staged))


def stage_page(source: Path, target: Path, staged: Path) -> None:
    """Write a page with the links of the site, and copy the files that it links to."""
    target.parent.mkdir(parents=True, exist_ok=True)

    def site_link(match: re.Match[str]) -> str:
        name = match[2]
        if re.match(r"\w+:", name):
            return match[0]
        path = (source.parent / name).resolve()
        if path == ROOT / "README.md":
            name = name.removesuffix("README.md") + "index.md"
        elif path.name == "tutorial.ipynb":
            name = name.removesuffix("ipynb") + "md"
        elif path.is_file() and path.suffix != ".md":
            copy = staged / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
        return f"{match[1]}{name}{match[3]}"

    target.write_text(LINK.sub(site_link, source.read_text()))


def stage_api(folder: Path) -> None:
    """Write one page of the API per topic, from docstrings, and a page that lists them."""
    folder.mkdir()
    rows = []
    for page, (title, module, names) in API.items():
        listed = names.split() or public_names(module)
        entries = [f".. auto{directive(module, name)}:: {module}.{name}" for name in listed]
        if not names:
            entries.insert(0, f".. automodule:: {module}\n   :no-members:")
        directives = "\n\n".join(entries)
        (folder / f"{page}.md").write_text(
            f"# {title}\n\nNames of `{module}`.\n\n```{{eval-rst}}\n{directives}\n```\n"
        )
        spans = ", ".join(f"`{name}`" for name in listed)
        rows.append(f"| [{title}]({page}.md) | `{module}` | {spans} |")
    tree = "\n".join(["```{toctree}", ":hidden:", "", *API, "```"])
    table = "\n".join(["| topic | module | names |", "|---|---|---|", *rows])
    (folder / "index.md").write_text(f"# API\n\n{table}\n\n{tree}\n")


def public_names(module: str) -> list[str]:
    """The names in `__all__` of a module, without modules and private names."""
    exported = importlib.import_module(module)
    return [
        name
        for name in exported.__all__
        if name[0] != "_" and not inspect.ismodule(getattr(exported, name))
    ]


def directive(module: str, name: str) -> str:
    """The suffix of the autodoc directive for a name."""
    value = getattr(importlib.import_module(module), name)
    if inspect.isclass(value):
        return "exception" if issubclass(value, Exception) else "class"
    return "function" if callable(value) else "data"


def contents(staged: Path) -> str:
    """The tree of all pages; pages without a group come last."""
    pages = {str(p.relative_to(staged).with_suffix("")) for p in staged.rglob("*.md")}
    pages -= {"index", *(f"api/{page}" for page in API)}
    frameworks = sorted(page for page in pages if page.startswith("docs/integrations/"))
    grouped = {page for group in CONTENTS.values() for page in group}
    rest = sorted(pages - grouped - set(frameworks))
    trees = []
    for title, group in CONTENTS.items():
        listed = {FRAMEWORKS: frameworks, REST: rest}.get(title, group)
        options = f":hidden:\n:caption: {title}\n"
        trees.append(f"```{{toctree}}\n{options}\n" + "\n".join(listed) + "\n```\n")
    return "\n" + "\n".join(trees)


def external_resources(site: Path) -> list[str]:
    """Tags of pages and styles that load something from the network."""
    return [
        f"{path.relative_to(site)}: {match[0]}"
        for path in sorted([*site.rglob("*.html"), *site.rglob("*.css")])
        for match in LOADED.finditer(path.read_text())
        if not ALLOWED.match(match[0])
    ]


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
        raise SystemExit("make docs: fix the warnings above")
    search.write_search(site)
    if tags := external_resources(site):
        raise SystemExit("\n".join(["these tags load from the network:", *tags]))
    print(f"{len(list(site.rglob('*.html')))} pages: {site / 'index.html'}")


if __name__ == "__main__":
    main()
