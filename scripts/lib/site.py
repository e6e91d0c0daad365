"""A hook of `mkdocs` that adds pages and figures, and turns formulas into MathML."""

import html
import json
import re
from pathlib import Path
from typing import Any

FIGURES = ("benchmarks/depth_cpu.png", "benchmarks/depth_h100.png")
NOTEBOOK = "clipping_bias"
# Pages of the site that are not in docs/, and their files.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
FORMULA = re.compile(
    r'<(?:span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</(?:span|div)>', re.DOTALL
)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages beside docs/, the figures and the notebook to the site."""
    from mkdocs.structure.files import File

    for name, path in {**PAGES, **{x: x for x in FIGURES}}.items():
        files.append(File.generated(config, name, abs_src_path=path))
    notebook = json.loads(Path(config.docs_dir, f"{NOTEBOOK}.ipynb").read_text(encoding="utf-8"))
    files.append(File.generated(config, f"{NOTEBOOK}.md", content=as_markdown(notebook)))
    return files


def as_markdown(notebook: Any) -> str:
    """A notebook's text and code, with the output and the figures of its cells."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                image = output["data"]["image/png"].strip()
                parts.append(f"![{cell['metadata']['alt']}](data:image/png;base64,{image})")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, **unused: Any) -> str:
    """Points links to the places on the site.

    A link to a folder becomes its name.
    """
    markdown = re.sub(r"\[(\w+/)\]\((?:\.\./)?\w+\)", r"`\1`", markdown)
    for name, path in PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)?{path}", f"]({name}", markdown)
    markdown = markdown.replace("](docs/", "](").replace("](../benchmarks/", "](benchmarks/")
    return markdown.replace(f"({NOTEBOOK}.ipynb)", f"({NOTEBOOK}.md)")


def on_post_page(output: str, **unused: Any) -> str:
    """Turns LaTeX into MathML, which browsers draw without fetching a script."""
    from latex2mathml.converter import convert

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match[1] == "[" else "inline"
        return f'<span class="math">{convert(html.unescape(match[2]), display=display)}</span>'

    return FORMULA.sub(mathml, output)
