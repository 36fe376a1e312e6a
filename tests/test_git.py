"""git in the repository of a folder, whatever the environment says."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from common.system import git, machine

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="needs git")

AUTHOR = ("-c", "user.name=Test", "-c", "user.email=test@example.org")


@pytest.fixture
def repositories(tmp_path):
    """Two of one commit each: mine, which is asked about, and foreign, which the environment names."""
    folders = tmp_path / "mine", tmp_path / "foreign"
    for folder in folders:
        folder.mkdir()
        git.run(folder, "init", "--quiet")
        git.run(folder, *AUTHOR, "commit", "--quiet", "--allow-empty", "-m", folder.name)
    return folders


def test_the_state_is_that_of_the_folder(repositories, monkeypatch):
    mine, foreign = repositories
    commit = git.run(mine, "rev-parse", "HEAD").strip()
    monkeypatch.setenv("GIT_DIR", str(foreign / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(foreign))
    assert machine.git_state(mine) == (commit, False)
    (mine / "new.txt").touch()
    assert machine.git_state(mine) == (commit, True)


def test_no_repository_has_no_state(tmp_path):
    assert machine.git_state(tmp_path) == (None, None)
    with pytest.raises(git.GitError, match="not a git repository"):
        git.run(tmp_path, "status")


def test_every_variable_that_names_a_repository_is_dropped(monkeypatch):
    """The names are those of this git; settings stay, as git keeps them for the repositories of submodules."""
    listed = subprocess.run(["git", "rev-parse", "--local-env-vars"], check=True, capture_output=True, text=True)
    settings = {"GIT_CONFIG_PARAMETERS", "GIT_CONFIG_COUNT"}
    assert set(listed.stdout.split()) - settings <= set(git.LOCAL_VARIABLES)
    for name in git.LOCAL_VARIABLES:
        monkeypatch.setenv(name, "x")
    assert not set(git.LOCAL_VARIABLES) & set(git.environment())


def test_a_setting_comes_after_those_of_the_user(repositories, monkeypatch):
    mine, _ = repositories
    for name, value in git.with_setting({}, "user.name", "Somebody").items():
        monkeypatch.setenv(name, value)
    for name, value in git.with_setting(git.environment(), "core.excludesFile", "/dev/null").items():
        monkeypatch.setenv(name, value)
    assert git.run(mine, "config", "user.name") == "Somebody\n"
    assert git.run(mine, "config", "core.excludesFile") == "/dev/null\n"
