"""A hook of `mkdocs`: pictures from `benchmarks/`, outside of `docs/`, and formulas as MathML."""

import html
import re
from typing import Any

FIGURES = ("benchmarks/depth_cpu.png",)
FORMULA = re.compile(
    r'<(?:span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</(?:span|div)>', re.DOTALL
)


def on_files(files: Any, config: Any) -> Any:
    """Adds the figures to the site."""
    from mkdocs.structure.files import File

    for figure in FIGURES:
        files.append(File.generated(config, figure, abs_src_path=figure))
    return files


def on_page_markdown(markdown: str, **unused: Any) -> str:
    """Points to them where they are on the site; a folder itself is named, not linked."""
    markdown = re.sub(r"\[(\w+/)\]\((?:\.\./)?\w+\)", r"`\1`", markdown)
    return markdown.replace("](../benchmarks/", "](benchmarks/")


def on_post_page(output: str, **unused: Any) -> str:
    """Turns LaTeX into MathML, which browsers draw by themselves: nothing is fetched."""
    from latex2mathml.converter import convert

    def mathml(match: re.Match[str]) -> str:
        display = "block" if match[1] == "[" else "inline"
        return f'<span class="math">{convert(html.unescape(match[2]), display=display)}</span>'

    return FORMULA.sub(mathml, output)
