"""Fetched archives are unpacked whole, inside of the root, or not at all."""

import errno
import re
import stat
import tarfile
import zipfile

import pytest
from folders import faults, section
from loopback import CONTENT, fails, files, hidden, one, ranges, tarred, zipped

from idmm.data.datasets import open_splits
from idmm.data.download import fetch


def entry(kind, target=""):
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


def zip_link(target):
    info = zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return zipped((info, target))


UP = "../" * 3  # from ROOT/.idmm/NAME.unpacking
HOSTILE = {
    "parent.tgz": lambda place: tarred({"fine.txt": b"fine", f"{UP}evil": b"evil"}),
    "symlink.tgz": lambda place: tarred({"link": entry(tarfile.SYMTYPE, str(place)), "link/evil": b"evil"}),
    "relative.tgz": lambda place: tarred({"a/link": entry(tarfile.SYMTYPE, f"../{UP}"), "a/link/evil": b"evil"}),
    "hardlink.tgz": lambda place: tarred({"link": entry(tarfile.LNKTYPE, f"{UP}secret")}),
    "absolute.tar": lambda place: tarred({"link": entry(tarfile.LNKTYPE, str(place / "secret"))}, "w"),
    "device.tar.gz": lambda place: tarred({"null": entry(tarfile.CHRTYPE)}),
    "pipe.tar.xz": lambda place: tarred({"pipe": entry(tarfile.FIFOTYPE)}, "w:xz"),
    "parent.zip": lambda place: zipped(("fine.txt", b"fine"), (f"{UP}evil", b"evil")),
    "backslash.zip": lambda place: zipped((UP.replace("/", "\\") + "evil", b"evil")),
    "drive.zip": lambda place: zipped(("C:/evil", b"evil")),
    "absolute.zip": lambda place: zipped((f"{place}/evil", b"evil")),
    "symlink.zip": lambda place: zip_link(str(place)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives_are_refused(name, server, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    root = tmp_path / "root"
    row = one(server, HOSTILE[name](tmp_path), name)
    line = fails(row, root)
    assert line.startswith(f"{root}/.idmm/{name}: refused, ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "secret"]
    assert secret.read_text() == "secret" and secret.stat().st_nlink == 1
    assert files(root) == [] and hidden(root) == [name]


def test_an_absolute_path_in_a_tar_becomes_a_relative_one(server, tmp_path):
    fetch(one(server, tarred({f"{tmp_path}/evil": b"evil"}), "a.tgz"), tmp_path / "root")
    assert not (tmp_path / "evil").exists()
    assert files(tmp_path / "root") == [f"{tmp_path}/evil"[1:]]


def test_links_within_an_archive_are_fine(server, tmp_path):
    content = {"a/b": b"b", "link": entry(tarfile.SYMTYPE, "a/b"), "hard": entry(tarfile.LNKTYPE, "a/b")}
    content["dangling"] = entry(tarfile.SYMTYPE, "nowhere")
    row = one(server, tarred(content), "links.tgz")
    fetch(row, tmp_path)
    assert files(tmp_path) == ["a/b", "dangling", "hard", "link"] and (tmp_path / "link").read_bytes() == b"b"
    server.asked.clear()
    fetch(row, tmp_path)
    assert server.asked == []


def flipped(content, where):
    return content[:where] + bytes([content[where] ^ 255]) + content[where + 1 :]


BIG = {"a.txt": CONTENT[:50_000], "b.txt": CONTENT[50_000:100_000]}
DAMAGED = {
    "truncated.tar.gz": tarred(BIG)[:-30_000],
    "truncated.tgz": tarred(BIG)[:-4],
    "truncated.tar": tarred(BIG, "w")[:80_000],
    "truncated.zip": zipped(*BIG.items())[:-100],
    "flipped.tgz": flipped(tarred(BIG), 60_000),
    "flipped.tar.bz2": flipped(tarred(BIG, "w:bz2"), 60_000),
    "flipped.tar.xz": flipped(tarred(BIG, "w:xz"), 60_000),
    "flipped.zip": flipped(zipped(*BIG.items()), 60_000),
    "page.tgz": b"<html>Please log in</html>",
    "page.zip": b"<html>Please log in</html>",
    "empty.tar": b"",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_archives(name, server, tmp_path):
    row = one(server, DAMAGED[name], name, checksum=None)
    kept = tmp_path / ".idmm" / name
    wanted = rf"{re.escape(str(kept))}: damaged archive \(.+\); remove it to fetch it again"
    assert re.fullmatch(wanted, fails(row, tmp_path))
    assert files(tmp_path) == [] and hidden(tmp_path) == [name]
    server.files[f"/{name}"] = zipped(("a", b"a")) if name.endswith(".zip") else tarred({"a": b"a"})
    kept.unlink()
    fetch(row, tmp_path)
    assert files(tmp_path) == ["a"] and hidden(tmp_path) == [f"{name}.done"]


def test_an_interrupted_unpacking_is_done_again(server, tmp_path):
    content = tarred({"data/a.txt": b"whole", "data/b.txt": b"whole"})
    aside = tmp_path / ".idmm/data.tgz.unpacking/data"
    aside.mkdir(parents=True)
    (aside / "junk.txt").write_text("junk")
    (aside.parents[1] / "data.tgz").write_bytes(content)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("who")  # merged, but cut by a crash
    fetch(one(server, content, "data.tgz"), tmp_path)
    assert server.asked == []  # it had been fetched
    assert files(tmp_path) == ["data/a.txt", "data/b.txt"] and (tmp_path / "data/a.txt").read_text() == "whole"
    assert hidden(tmp_path) == ["data.tgz.done"]


@pytest.mark.parametrize("gone", ["flowers-102/setid.mat", "flowers-102/jpg/image_00002.jpg", "flowers-102"])
@pytest.mark.parametrize("by", ["hand", "us"])
def test_a_half_unpacked_dataset_is_completed(gone, by, flowers, server, tmp_path, capsys):
    """By hand: unpacked by the user. Us: fetched, then partly removed."""
    if by == "us":
        fetch(flowers, tmp_path / "root")
    root = tmp_path / ("root" if by == "us" else "source")
    (root / gone).rename(tmp_path / "gone")
    server.asked.clear()
    open_splits(section(root, name="flowers", download=True), labelled=True)
    whole = {"setid.mat": ["setid.mat"], "image_00002.jpg": ["102flowers.tgz"]}.get(gone.rpartition("/")[2])
    names = [archive.name for archive in flowers.archives] if by == "hand" or whole is None else whole
    assert [path.rpartition("/")[2] for path, _ in server.asked] == names


# ------------------------------------------------------------------ the disk
def test_a_root_that_cannot_be_written(flowers, server, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    wanted = f"data.root: cannot write to '{tmp_path}/file' (not a directory); wanted a folder"
    assert faults(open_splits, section(tmp_path / "file", name="flowers", download=True), True) == [wanted]


def test_a_full_disk(server, tmp_path):
    (tmp_path / ".idmm").mkdir()
    (tmp_path / ".idmm/file.bin.part").symlink_to("/dev/full")
    wanted = f"file.bin: cannot be stored (No space left on device: '{tmp_path}'); what was fetched is kept"
    assert fails(one(server), tmp_path) == wanted and ranges(server) == [0]


@pytest.mark.parametrize("kind, name", [(tarfile.TarFile, "a.tgz"), (zipfile.ZipFile, "a.zip")])
def test_a_disk_that_becomes_full_in_unpacking(kind, name, server, monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    row = one(server, zipped(("a", b"a")) if name == "a.zip" else tarred({"a": b"a"}), name)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "extractall", refuse)
        wanted = f"{name}: cannot be stored (No space left on device: '{tmp_path}'); what was fetched is kept"
        assert fails(row, tmp_path) == wanted
    fetch(row, tmp_path)
    assert ranges(server) == [0] and files(tmp_path) == ["a"]


def test_a_folder_in_the_place_of_a_file(server, tmp_path):
    (tmp_path / "file.bin").mkdir()
    row = one(server)
    assert re.match(r"file.bin: cannot be stored \(Is a directory: .*what was fetched is kept", fails(row, tmp_path))
    (tmp_path / "file.bin").rmdir()
    fetch(row, tmp_path)
    assert ranges(server) == [0] and (tmp_path / "file.bin").read_bytes() == CONTENT
