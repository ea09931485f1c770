"""What the site needs beyond the pages of docs/: the project's other documents, and docstrings as Markdown.

The pages link to files of the checkout, so that they also work where they lie. On the site the documents among these
files become pages below ``project/``, and links to them, to pages and between them are made to fit; a link to anything
else of the checkout (a script, a folder) becomes its name.
"""

from __future__ import annotations

import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ("ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/README.md", "csrc/README.md", "csrc/cuda/README.md")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> None:
    """A link to the repository at the foot of each page, where its address is known.

    The theme's own `repo_url` would let each reader's browser ask the host of the repository about it.
    """
    urls = runpy.run_path(str(ROOT / "project_urls.py"))["project_urls"](ROOT)
    if urls:
        link = {"icon": "fontawesome/brands/git-alt", "name": "Repository", "link": urls["Repository"]}
        config["extra"]["social"] = [link]


def on_files(files: Any, config: Any) -> Any:
    for name in PROJECT:
        files.append(File.generated(config, f"project/{name}", content=ROOT.joinpath(name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    here = page.file.src_uri
    in_checkout = here.removeprefix("project/") if here.startswith("project/") else f"docs/{here}"

    def fitted(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(in_checkout), target))
        if path in PROJECT:
            page_path = f"project/{path}"
        elif path.startswith("docs/"):
            page_path = path.removeprefix("docs/")
        elif ROOT.joinpath(path).exists():
            return text if text.startswith("`") else f"{text} (`{path}`)"
        else:
            return match[0]  # mkdocs says that there is no such page
        return f"[{text}]({posixpath.relpath(page_path, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(fitted, markdown)


class PlainDocstrings(griffe.Extension):
    """Docstrings are written for ``help()``, with some reStructuredText; this makes Markdown of it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


BORDER = re.compile(r" *=+( +=+)+ *")


def as_markdown(text: str) -> str:
    """Roles become code, a simple table becomes one of Markdown, and a block after ``::`` keeps its shape, fenced."""
    rows = re.sub(r":(?:func|class|mod|meth|data|attr):`~?([^`]+)`", r"`\1`", text).splitlines()
    lines: list[str] = []
    while rows:
        row = rows.pop(0)
        if BORDER.fullmatch(row):
            table = [row]
            while rows and rows[0].strip():
                table.append(rows.pop(0))
            lines += ["", *_table(table), ""]
        elif row.rstrip().endswith("::"):
            intro = row.rstrip().removesuffix("::").rstrip()
            indent = row[: len(row) - len(row.lstrip())]
            block = []
            while rows and (not rows[0].strip() or rows[0].startswith(f"{indent} ")):
                block.append(rows.pop(0))
            lines += [f"{intro}:" if intro else "", "", f"{indent}```text", *_without_ends(block), f"{indent}```", ""]
        else:
            lines.append(row)
    return "\n".join(lines)


def _without_ends(block: list[str]) -> list[str]:
    """A block without the empty lines around it; those inside hold a space, so that the section goes on."""
    filled = [number for number, line in enumerate(block) if line.strip()]
    return [line or " " for line in block[filled[0] : filled[-1] + 1]] if filled else []


def _table(lines: list[str]) -> list[str]:
    """Of the lines from the first border to the last; three borders are a table with a header."""
    starts = [match.start() for match in re.finditer("=+", lines[0])]
    ends = [*starts[1:], None]
    cells: list[list[str]] = []
    for line in lines:
        found = [line[start:end].strip().replace("|", "\\|") for start, end in zip(starts, ends, strict=True)]
        if BORDER.fullmatch(line):
            continue
        if not found[0] and cells:  # the row before goes on
            cells[-1] = [f"{before} {more}".strip() for before, more in zip(cells[-1], found, strict=True)]
        else:
            cells.append(found)
    header = cells.pop(0) if sum(bool(BORDER.fullmatch(line)) for line in lines) == 3 else [""] * len(starts)
    indent = " " * starts[0]
    return [f"{indent}| {' | '.join(row)} |" for row in (header, ["---"] * len(starts), *cells)]
