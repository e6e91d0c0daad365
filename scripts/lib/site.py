"""A hook of `mkdocs`: what the pages show of `benchmarks/`, which lies outside of `docs/`."""

import re
from typing import Any

FIGURES = ("benchmarks/depth_cpu.png",)


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
