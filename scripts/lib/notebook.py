"""Runs a notebook's cells in order, stores what they print and draw in it, and writes it as a page.

python -m scripts.lib.notebook docs/clipping_bias.ipynb
"""

import base64
import contextlib
import io
import json
import sys
from pathlib import Path

import matplotlib

from bam import files
from bam.files import JsonObject

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def executed(notebook: JsonObject) -> tuple[JsonObject, JsonObject]:
    """The notebook with the outputs of a new run, and the names that its cells defined."""
    names: JsonObject = {"__name__": "__main__"}
    notebook = json.loads(json.dumps(notebook))
    code_cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(code_cells, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"<cell {cell['id']}>", "exec"), names)
        text = printed.getvalue().splitlines(keepends=True)
        stream = {"name": "stdout", "output_type": "stream", "text": text}
        cell["outputs"] = [stream] * bool(text) + [_drawn(n) for n in plt.get_fignums()]
        cell["execution_count"] = number
        plt.close("all")
    return notebook, names


def _drawn(number: int) -> JsonObject:
    """An output that holds a figure as PNG, and its label as alternative text."""
    image, figure = io.BytesIO(), plt.figure(number)
    figure.savefig(image, format="png", dpi=100, metadata={"Software": None})
    data = {"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": ["a figure"]}
    return {"data": data, "metadata": {}, "output_type": "display_data"}


def page(notebook: JsonObject, name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and the pictures that it shows by their file names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
                continue
            file = f"{name}_{len(pictures) + 1}.png"
            pictures[file] = base64.b64decode(output["data"]["image/png"])
            parts.append(f"![{cell['metadata']['alt']}](figures/{file})")
    return "\n\n".join(parts) + "\n", pictures


if __name__ == "__main__":
    path = Path(sys.argv[1])
    done, _ = executed(json.loads(path.read_text(encoding="utf-8")))
    files.write_text(path, json.dumps(done, indent=1, ensure_ascii=False) + "\n")
    text, pictures = page(done, path.stem)
    files.write_text(path.with_suffix(".md"), text)
    for file, image in pictures.items():
        (path.parent / "figures" / file).write_bytes(image)
