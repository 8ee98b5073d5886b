"""Hooks of MkDocs: pages and examples outside docs/ join the site, and links to them stay valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
PAGES = {
    "OVERVIEW.md": "README.md", "ARCHITECTURE.md": "ARCHITECTURE.md", "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md", "examples/README.md": "examples/README.md",
}  # fmt: skip
"""Pages of the site by the files of the repository that they show."""
LINKS = [("](../README.md", "](OVERVIEW.md"), ("](../examples/", "](examples/"), ("](../", "](")]
"""Links from docs/ to files outside."""
ROOT_LINKS = [("](docs/", "]("), ("](README.md", "](OVERVIEW.md")]
"""Links from the root of the repository."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and the examples."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for path in sorted((ROOT / "examples").rglob("*")):
        if path.is_file() and path.suffix in {".py", ".ipynb", ".yml", ".sql"}:
            name = str(path.relative_to(ROOT))
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links for the place of the page in the site."""
    name = page.file.src_uri
    if name in PAGES or name.startswith("reports/"):
        page.meta["search"] = {"boost": 0.3}  # guides first
    if name == "examples/README.md":
        return markdown.replace("](../docs/", "](../")
    if "/" in name:
        return re.sub(r"\]\(\.\./\.\./", "](../", markdown)
    for old, new in ROOT_LINKS if name in PAGES else LINKS:
        markdown = markdown.replace(old, new)
    return markdown
