"""The tutorial without Jupyter: run its cells, store their output, convert it to Markdown.

python docs/site/notebook.py docs/tutorial.ipynb     # run it and save the output
"""

from __future__ import annotations

import io
import json
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

TEMPORARY = re.compile(r"/[\w/.-]*/tmp\w{8}\b")  # temporary folders have random names


def run(notebook: dict[str, Any]) -> None:
    """Run all cells in one namespace and store what they print as their outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells_of(notebook, "code"), start=1):
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        text = TEMPORARY.sub("work", printed.getvalue())
        lines = [f"{line.rstrip()}\n" for line in text.splitlines()]
        stream = {"name": "stdout", "output_type": "stream", "text": lines}
        cell["outputs"], cell["execution_count"] = [stream] if lines else [], number


def cells_of(notebook: dict[str, Any], cell_type: str) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == cell_type]


def page(notebook: dict[str, Any]) -> str:
    """Convert the notebook to Markdown."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def read(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text())
    return notebook


def main() -> None:
    path = Path(sys.argv[1])
    notebook = read(path)
    run(notebook)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
