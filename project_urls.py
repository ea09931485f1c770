"""The project's addresses on the web, taken from the repository that it is built from; none is written down anywhere.

setup.py puts them into the package's metadata, and the site links to the repository. It runs before anything is
installed, and so uses the standard library alone.
"""

from __future__ import annotations

import re
import subprocess
from email.parser import HeaderParser
from pathlib import Path

HOST = r"(?:[a-z0-9-]+\.)+[a-z][a-z0-9-]*"  # no address of four numbers, and no name that only one machine knows
PATH = r"[\w~][\w.~-]*(?:/[\w~][\w.~-]*)+"  # an owner, or groups, and a name
# A name and password before the host, a question and an anchor behind the path are left out: they may hold secrets.
WEB = re.compile(rf"(https?)://(?:[^/?#]*@)?({HOST}(?::\d+)?)/({PATH})/?(?:[?#].*)?", re.I | re.A)
SSH = re.compile(rf"(?:(?:git\+)?ssh://git@({HOST})(?::\d+)?/|git@({HOST}):)({PATH})/?", re.I | re.A)
PAGES = {
    "github.com": {"Documentation": "tree/HEAD/docs", "Changelog": "blob/HEAD/CHANGELOG.md", "Issues": "issues"},
    "gitlab.com": {"Documentation": "-/tree/HEAD/docs", "Changelog": "-/blob/HEAD/CHANGELOG.md", "Issues": "-/issues"},
}
"""Where hosts have these pages. On other hosts only the repository's own address is known."""


def project_urls(root: Path) -> dict[str, str]:
    """Name and address of each page: of the sdist in this folder, or of the clone; empty if it is neither."""
    information = root / "PKG-INFO"
    if information.is_file():
        lines = HeaderParser().parsestr(information.read_text(encoding="utf-8")).get_all("Project-URL", [])
        return dict(line.split(", ", 1) for line in lines)
    return urls_of(remote(root))


def remote(root: Path) -> str:
    """Where this clone came from; empty if the folder is no clone, or lies in one of another project."""
    if not root.joinpath(".git").exists():
        return ""
    try:
        asked = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
        return subprocess.run(asked, stdout=subprocess.PIPE, text=True, timeout=60).stdout.strip()
    except FileNotFoundError:  # there is no git
        return ""


def urls_of(remote: str) -> dict[str, str]:
    """The pages of a repository whose remote is an address on the web, or what git hosts show for SSH."""
    if web := WEB.fullmatch(remote):
        scheme, host, path = web.groups()
    elif ssh := SSH.fullmatch(remote):
        scheme, host, path = "https", ssh[1] or ssh[2], ssh[3]
    else:
        return {}
    host = host.lower()
    repository = f"{scheme.lower()}://{host}/{path.removesuffix('.git')}"
    pages = PAGES.get(host, {})
    return {"Repository": repository, **{name: f"{repository}/{page}" for name, page in pages.items()}}
