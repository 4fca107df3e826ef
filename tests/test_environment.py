"""Environment variables that other programs left in a shell, and users without a home folder."""

import pwd

import pytest
from folders import TINY, tree, tuned
from helpers import Forked, call, flags, inside

QUICK = dict(train__epochs=1, train__ema=None, stages=None, train__size=16, data__subset={"total": 20})
SHELLS = {
    "a scheduler's": {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"},
    "no number": {"WORLD_SIZE": "two"},
}


@pytest.mark.parametrize("shell", SHELLS)
def test_processes_that_do_not_exist(tmp_path, shell):
    with Forked(
        ["finetune", *flags("finetune", tmp_path / "a", **QUICK)], tmp_path / "err", **SHELLS[shell]
    ) as process:
        assert process.wait() == 2
        (line,) = process.said().splitlines()[-1:]
        assert line.startswith("environment: accelerate cannot start (") and "unset WORLD_SIZE, RANK" in line


def test_no_home_folder(tmp_path, monkeypatch, capsys):
    """As for ``docker run --user 12345``: images are decoded at each use, with one line in each command."""

    def nobody(uid):
        raise KeyError(uid)

    root = tree(tmp_path / "images", train={"cat": 4, "dog": 4}, val={"cat": 2, "dog": 2})
    for name in ("HOME", "IDMM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.chdir(tmp_path)
    line = "data.cache_dir: '~/.cache/idmm' has no place, as there is no home folder: images are decoded at each use"
    of = ["--data.root", root, "--size", "16"]
    for code in (
        lambda: inside("pretrain", "a", **TINY, data__root=str(root)),
        lambda: tuned("b", root, init="a", model__kwargs=None, model__name=None),
        lambda: call(["probe", "--init", "a", *of, "--out", "c"]),
        lambda: call(["explore", "a"]),
        lambda: call(["data", "check", "--root", root]),
        lambda: call(["embed", root, "--init", "a", "--out", "e.npz"]),
        lambda: call(["predict", root / "val", "--init", "b", "--out", "p.csv"]),
    ):
        assert code() == 0
        assert capsys.readouterr().err.count(line) <= 1
    assert line in (tmp_path / "a/log.txt").read_text() and not (tmp_path / "~").exists()
