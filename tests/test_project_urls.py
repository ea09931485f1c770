"""The package's addresses are those of the repository that it is built from, without anybody's secrets, or none."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOUND = runpy.run_path(str(ROOT / "project_urls.py"))
pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("remote", "repository"),
    [
        ("https://git.example.org/owner/name", "https://git.example.org/owner/name"),
        ("https://git.example.org/owner/name.git/", "https://git.example.org/owner/name"),
        ("http://git.example.org:8080/a/group/name.git", "http://git.example.org:8080/a/group/name"),
        ("https://git.sr.ht/~owner/name", "https://git.sr.ht/~owner/name"),
        ("git@git.example.org:owner/name.git", "https://git.example.org/owner/name"),
        ("ssh://git@git.example.org:2222/owner/name.git", "https://git.example.org/owner/name"),
        # nobody's secrets
        ("https://hunter2@git.example.org/owner/name.git", "https://git.example.org/owner/name"),
        ("https://me:hunter2@git.example.org/owner/name.git", "https://git.example.org/owner/name"),
        ("https://me:hunter2@@git.example.org/owner/name.git", "https://git.example.org/owner/name"),
        ("https://git.example.org/owner/name.git?token=hunter2#hunter2", "https://git.example.org/owner/name"),
        ("https://m.e:hunter2/x@git.example.org/owner/name", None),
        ("https://hunter.x/hunter2@git.example.org/owner/name", None),
        # no page that anybody else could open
        ("", None),
        ("/srv/git/name.git", None),
        ("../name", None),
        ("C:/checkouts/owner/name", None),
        ("file:///srv/git/name.git", None),
        ("https://localhost/owner/name", None),
        ("http://127.0.0.1:8080/owner/name", None),
        ("https://git.example.org/name", None),
        ("git@git.example.org:/srv/git/name.git", None),
        ("ssh://me@git.example.org/srv/git/name.git", None),
        ("my-alias:owner/name", None),
    ],
)
def test_of_a_remote_only_what_anybody_may_open_is_taken(remote: str, repository: str | None) -> None:
    assert FOUND["urls_of"](remote) == ({} if repository is None else {"Repository": repository})


def test_other_pages_are_named_where_the_host_is_known_to_have_them() -> None:
    assert FOUND["urls_of"]("git@github.com:owner/name.git") == {
        "Repository": "https://github.com/owner/name",
        "Documentation": "https://github.com/owner/name/tree/HEAD/docs",
        "Changelog": "https://github.com/owner/name/blob/HEAD/CHANGELOG.md",
        "Issues": "https://github.com/owner/name/issues",
    }
    assert FOUND["urls_of"]("https://gitlab.com/a/b/name")["Issues"] == "https://gitlab.com/a/b/name/-/issues"
    assert ROOT.joinpath("CHANGELOG.md").is_file() and ROOT.joinpath("docs").is_dir()


def test_a_clone_has_its_remotes_address_and_a_folder_within_it_has_none(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True, timeout=60)
    assert FOUND["project_urls"](tmp_path) == {}, "there is no remote"
    address = "https://me:hunter2@git.example.org/owner/name.git"
    subprocess.run(["git", "-C", str(tmp_path), "remote", "add", "origin", address], check=True, timeout=60)
    assert FOUND["project_urls"](tmp_path) == {"Repository": "https://git.example.org/owner/name"}
    within = tmp_path / "vendored"
    within.mkdir()
    assert FOUND["project_urls"](within) == {}, "the address is another project's"


def test_without_git_there_is_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath(".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert FOUND["project_urls"](tmp_path) == {}


def test_an_sdist_keeps_the_addresses_that_it_was_made_with(tmp_path: Path) -> None:
    fields = "Metadata-Version: 2.4\nProject-URL: Repository, https://a.org/b/c\nProject-URL: Issues, https://a.org/d\n"
    tmp_path.joinpath("PKG-INFO").write_text(f"{fields}\nProject-URL: Trap, of the description\n")
    assert FOUND["project_urls"](tmp_path) == {"Repository": "https://a.org/b/c", "Issues": "https://a.org/d"}
