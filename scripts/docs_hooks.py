"""Prepares the pages of docs/ before MkDocs renders them; `hooks` of mkdocs.yml names this file.

Pages link to files of the repository by relative paths, which work where the repository is read. On the site
such a link leads to the repository if its address is known (`DOCS_REPO_URL`), and is plain text otherwise. A
line `--8<-- "path"` is replaced by a file of the repository, whose relative links keep their meaning.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^--8<-- "([^"]+)"$', re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Includes files and rewrites links; called by MkDocs for each page."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    return prepared(markdown, folder, config.repo_url or "")


def prepared(markdown: str, folder: str, repo_url: str) -> str:
    """Returns the text of a page in `folder`, a path from the root of the repository."""
    included = INCLUDE.sub(lambda match: _rebased(match[1], folder), markdown)
    return LINK.sub(lambda match: _link(match, folder, repo_url), included)


def _rebased(path: str, folder: str) -> str:
    """Returns the text of a file, with relative links rewritten for `folder`."""

    def link(match: re.Match[str]) -> str:
        target = match[2]
        if not is_relative(target) or target.startswith("#"):
            return match[0]
        from_root = posixpath.join(posixpath.dirname(path), target)
        return f"[{match[1]}]({posixpath.relpath(from_root, folder)})"

    return LINK.sub(link, (ROOT / path).read_text(encoding="utf-8"))


def is_relative(target: str) -> bool:
    """Returns True for a path, with or without an anchor; False for an address of the web."""
    return not re.match(r"[a-z]+:", target)


def _link(match: re.Match[str], folder: str, repo_url: str) -> str:
    words, target = match[1], match[2]
    if not is_relative(target) or target.startswith("#"):
        return match[0]
    path, _, anchor = target.partition("#")
    from_root = posixpath.normpath(posixpath.join(folder, path))
    if from_root.startswith("docs/"):
        return match[0]
    if not repo_url:
        return words
    kind = "tree" if (ROOT / from_root).is_dir() else "blob"
    return f"[{words}]({repo_url.rstrip('/')}/{kind}/main/{from_root}{'#' * bool(anchor)}{anchor})"
