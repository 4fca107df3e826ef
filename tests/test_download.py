"""Datasets are fetched from a server on loopback that breaks, lies and stalls."""

import dataclasses
import http.client
import json
import logging
import re
import ssl
import threading

import numpy as np
import pytest
from folders import faults, section
from helpers import Process, call
from loopback import CONTENT, begun, fails, files, hidden, miniature, one, ranges

from idmm.data import download
from idmm.data.datasets import open_splits
from idmm.data.download import fetch
from idmm.data.images import decode
from idmm.data.registry import DATASETS

FETCHED = [name for name, row in DATASETS.items() if row.archives]


# ------------------------------------------------------------------ whole datasets
@pytest.mark.parametrize("name", FETCHED)
def test_every_dataset_that_can_be_fetched_opens_from_what_was_fetched(name, server, monkeypatch, tmp_path):
    monkeypatch.setitem(DATASETS, name, miniature(server, name, tmp_path / "source"))
    data = section(tmp_path / "root", name=name, download=True)
    found = open_splits(data, labelled=True)
    assert [path for path, _ in server.asked] == [f"/{name}/{archive.name}" for archive in DATASETS[name].archives]
    built = next(tmp_path.glob("source/svhn"), tmp_path / "source")
    wanted = open_splits(section(built, name=name), labelled=True)
    for part in ("train", "test"):
        a, b = getattr(found, part), getattr(wanted, part)
        assert (a.names, a.labels.tolist(), a.classes) == (b.names, b.labels.tolist(), b.classes)
        for left, right in zip(a.items, b.items, strict=True):
            if isinstance(left, str):
                left, right = decode(left, 10**6), decode(right, 10**6)
            np.testing.assert_array_equal(left, right)
    assert hidden(tmp_path / "root") == sorted(f"{a.name}.done" for a in DATASETS[name].archives)


def test_a_second_call_asks_for_nothing_and_the_users_own_files_stay(flowers, server, tmp_path):
    root = tmp_path / "root"
    mine = root / "flowers-102/jpg/mine.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_text("my own")
    (root / "notes.txt").write_text("my notes")
    open_splits(section(root, name="flowers", download=True), labelled=True)
    assert len(server.asked) == 3
    open_splits(section(root, name="flowers", download=True), labelled=True)
    fetch(flowers, root)
    assert len(server.asked) == 3
    assert mine.read_text() == "my own" and (root / "notes.txt").read_text() == "my notes"


def test_nothing_is_fetched_without_being_asked(flowers, server, tmp_path):
    root = tmp_path / "root"
    lines = faults(open_splits, section(root, name="flowers"), True)
    assert lines[0].startswith(f"data.root: '{root}' does not exist")
    assert lines[1:] == [f"data.download: 'idmm data download flowers --root {root}' fetches flowers"]
    assert server.asked == [] and not root.exists()
    assert faults(open_splits, section(name="flowers", download=True), True)[0].startswith("data.root: not given")


def test_the_command(flowers, server, tmp_path, capsys):
    argv = ["data", "download", "flowers", "--root", tmp_path / "root"]
    server.orders = [{"status": 404}]
    assert call(argv) == 1
    assert f"{flowers.archives[0].url}: the server says 404 Not Found" in capsys.readouterr().err.splitlines()
    assert call(argv) == 0
    assert capsys.readouterr().out == "flowers: 4 train, 4 test, all as the protocol has it\n"
    server.asked.clear()
    assert call(argv) == 0
    assert capsys.readouterr().out == "flowers is there already: 4 train, 4 test\n" and server.asked == []


@pytest.mark.parametrize("name", [name for name, row in DATASETS.items() if row.manual])
def test_datasets_behind_a_login_say_how_to_get_them(name, tmp_path):
    wanted = f"{name} cannot be downloaded: {DATASETS[name].manual}"
    assert faults(fetch, DATASETS[name], tmp_path / "a") == [f"data.name: {wanted}"]
    lines = faults(open_splits, section(tmp_path / "b", name=name, download=True), True)
    assert lines[-1] == f"data.root: {wanted}" and list(tmp_path.iterdir()) == []
    assert faults(fetch, DATASETS["digits"], tmp_path) == [
        "data.name: digits cannot be downloaded: it needs no download"
    ]


def test_registry_of_archives():
    archives = [archive for row in DATASETS.values() for archive in row.archives]
    for archive in archives:
        assert re.fullmatch("md5:[0-9a-f]{32}|sha256:[0-9a-f]{64}", archive.checksum), archive
        assert re.fullmatch(r"https?://[\w.]+/[\w./~-]+", archive.url), archive
        assert re.fullmatch(r"([\w-]+)?", archive.into), archive
    for what in ("name", "checksum"):  # two datasets may lie in one root
        assert len({getattr(archive, what) for archive in archives}) == len(archives)
    without = [name for name, row in DATASETS.items() if not row.archives and not row.manual]
    assert without == ["digits", "folder"]
    assert all(row.citation and row.licence and row.source for row in DATASETS.values() if row.name != "folder")


# ------------------------------------------------------------------ connections
CUTS = [{"cut": 100_000}, {"cut": 0}, {"cut": 50_000}, {"status": 503}, {"cut": 1}]
REFUSALS = [{"status": 503}, {"status": 429}, {"status": 500}, {"status": 408}]


@pytest.mark.parametrize(
    "orders, always, asked",
    [
        (CUTS, {}, [0, 100_000, 100_000, 150_000, 150_000, 150_001]),
        ([], {"cut": 20_000}, list(range(0, 300_000, 20_000))),  # many breaks with progress
        ([{"stall": 120_000}, {"stall": 0}], {}, [0, 120_000, 120_000]),
        (REFUSALS, {}, [0] * 5),
    ],
)
def test_broken_connections_go_on_from_where_they_broke(orders, always, asked, server, monkeypatch, tmp_path):
    monkeypatch.setattr(download, "TIMEOUT", 0.2 if "stall" in str(orders) else 10.0)
    server.orders, server.always = list(orders), always
    fetch(one(server), tmp_path)
    assert ranges(server) == asked and (tmp_path / "file.bin").read_bytes() == CONTENT


def test_giving_up_and_going_on_later(server, tmp_path):
    row = one(server)
    server.orders, server.always = [{"cut": 70_000}], {"cut": 0}
    line = f"{row.archives[0].url}: connection closed early; the same command goes on from 70000 bytes"
    assert fails(row, tmp_path) == line
    assert ranges(server) == [0] + [70_000] * download.TRIES
    assert files(tmp_path) == [] and hidden(tmp_path) == ["file.bin.part"]
    server.always = {}
    fetch(row, tmp_path)
    assert ranges(server) == [70_000] and (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_server_that_is_not_there(server, tmp_path):
    row = one(server)
    server.server_close()
    wanted = r"http://127\.0\.0\.1:\d+/file\.bin: .*[Rr]efused.*; the same command goes on from 0 bytes"
    assert re.fullmatch(wanted, fails(row, tmp_path))


@pytest.mark.parametrize("error", [ssl.SSLError(1, "record layer failure"), OSError(113, "No route to host")])
def test_a_connection_that_fails_in_the_middle_is_tried_again(error, server, monkeypatch, tmp_path):
    read = http.client.HTTPResponse.read1
    failing = [None, error]

    def read_or_fail(self, size):
        if failing and (failure := failing.pop(0)):
            raise failure
        return read(self, size)

    monkeypatch.setattr(http.client.HTTPResponse, "read1", read_or_fail)
    fetch(one(server), tmp_path)
    first, second = ranges(server)
    assert first == 0 < second and (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_server_that_ignores_range(server, tmp_path):
    server.ranges = False
    server.orders = [{"cut": 100_000}, {"cut": 60_000}]
    fetch(one(server), tmp_path)
    assert ranges(server) == [0, 100_000, 60_000] and (tmp_path / "file.bin").read_bytes() == CONTENT
    server.always = {"cut": 60_000}
    assert fails(one(server, name="b.bin"), tmp_path).endswith("goes on from 60000 bytes")
    assert ranges(server) == [0] + [60_000] * download.TRIES  # the same bytes again are no progress


def test_refusals(server, tmp_path):
    row = one(server)
    url = row.archives[0].url
    for status, words in ((404, "Not Found"), (403, "Forbidden"), (416, "Requested Range Not Satisfiable")):
        server.orders = [{"status": status}]  # 416 to one who asked for no part
        assert fails(row, tmp_path) == f"{url}: the server says {status} {words}"
    assert ranges(server) == [0, 0, 0]  # a refusal is not tried again
    server.orders = [{"status": 503}] * download.TRIES
    wanted = f"{url}: the server says 503 Service Unavailable; the same command goes on from 0 bytes"
    assert fails(row, tmp_path) == wanted


@pytest.mark.parametrize("size, asked", [(300_000, [300_000]), (300_001, [300_001, 0])])
def test_nothing_is_left_to_send(size, asked, server, tmp_path):
    """A part that is as long as the file is whole; a longer one is another file's."""
    begun(tmp_path, (CONTENT + b"x")[:size])
    fetch(one(server, checksum=None), tmp_path)
    assert ranges(server) == asked and (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_file_that_comes_from_elsewhere_now_is_fetched_again(server, tmp_path):
    fetch(one(server), tmp_path)
    server.files["/new/file.bin"] = b"new"
    fetch(one(server, url=server.url("/new/file.bin"), checksum=None), tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == b"new"


def test_the_bar_starts_no_monitor_thread(server, tmp_path, capsys):
    before = set(threading.enumerate())
    fetch(one(server), tmp_path)
    assert "file.bin: 100%" in capsys.readouterr().err
    new = set(threading.enumerate()) - before
    assert "TMonitor" not in [type(thread).__name__ for thread in new]


# ------------------------------------------------------------------ checksums
def test_a_wrong_checksum(server, tmp_path):
    found = server.archive("/file.bin", CONTENT).checksum.removeprefix("md5:")
    row = one(server, checksum="md5:" + "0" * 32)
    wanted = f"{row.archives[0].url}: its md5 is {found}, wanted {'0' * 32}; nothing was kept"
    assert fails(row, tmp_path) == wanted
    assert ranges(server) == [0] and files(tmp_path) == [] and hidden(tmp_path) == []
    server.orders = [{"cut": 100_000}]
    assert fails(row, tmp_path) == wanted and ranges(server) == [0, 100_000]
    begun(tmp_path, b"")
    assert fails(row, tmp_path) == wanted and ranges(server) == [0]


def test_other_kinds_of_checksum(server, tmp_path):
    fetch(one(server, b"abc", "a.bin", checksum=None), tmp_path)
    right = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    fetch(one(server, b"abc", "b.bin", checksum=right), tmp_path)
    assert files(tmp_path) == ["a.bin", "b.bin"]
    assert "its sha256 is ba7816" in fails(one(server, b"abc", "c.bin", checksum=right[:-1] + "e"), tmp_path)


def test_a_part_of_another_version_is_fetched_again_from_the_start_once(server, tmp_path, caplog):
    begun(tmp_path, b"old" * 1000)
    row = one(server)
    fetch(row, tmp_path)
    assert ranges(server) == [3000, 0] and (tmp_path / "file.bin").read_bytes() == CONTENT
    assert re.search(r"file\.bin: its md5 is \w+, wanted \w+; fetching it again from the start", caplog.text)
    begun(tmp_path / "b", b"old" * 1000)
    server.orders = [{"content": CONTENT}, {"content": CONTENT[:-1] + b"?"}]
    assert "nothing was kept" in fails(row, tmp_path / "b") and ranges(server) == [3000, 0]
    assert hidden(tmp_path / "b") == []


def test_a_server_that_changes_the_file_in_the_middle(server, tmp_path):
    server.orders = [{"cut": 100_000, "content": bytes(300_000)}]
    row = one(server)
    assert "nothing was kept" in fails(row, tmp_path) and ranges(server) == [0, 100_000]
    fetch(row, tmp_path)
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


# ------------------------------------------------------------------ processes
SCRIPT = """
import dataclasses, json, logging, sys
from idmm import config
from idmm.data.datasets import open_splits
from idmm.data.registry import DATASETS, Archive

logging.basicConfig(level=logging.INFO)
root, *archives = json.loads(sys.argv[1])
archives = tuple(Archive(*archive) for archive in archives)
free = dict.fromkeys(["num_classes", "train_size", "test_size"])
DATASETS["flowers"] = dataclasses.replace(DATASETS["flowers"], archives=archives, **free)
splits = open_splits(config.Data(name="flowers", root=root, download=True), labelled=True)
assert (len(splits.train), len(splits.test)) == (4, 4)
"""


def process(row, root, error):
    """A real process that opens flowers with data.download."""
    return Process(["-c", SCRIPT, json.dumps([str(root), *map(dataclasses.astuple, row.archives)])], error)


def test_two_processes_at_once_fetch_once(flowers, server, tmp_path):
    root, errors = tmp_path / "root", [tmp_path / "a", tmp_path / "b"]
    server.orders = [{"wait": threading.Event()}]
    answer = server.orders[0]["wait"]
    with process(flowers, root, errors[0]) as first, process(flowers, root, errors[1]) as second:
        assert first.until(lambda: server.asked and "waiting for another" in first.said() + second.said())
        assert len(server.asked) == 1
        answer.set()
        assert (first.wait(), second.wait()) == (0, 0), first.said() + second.said()
    assert len(server.asked) == 3
    assert (first.said() + second.said()).count("waiting") == 1


def test_a_killed_process_is_gone_on_with(server, monkeypatch, tmp_path):
    row = miniature(server, "flowers", tmp_path / "source", size=(200, 150))
    monkeypatch.setitem(DATASETS, "flowers", row)
    root = tmp_path / "root"
    server.orders = [{"stall": 100_000}]
    part = root / ".idmm/102flowers.tgz.part"
    with process(row, root, tmp_path / "error") as killed:
        assert killed.until(lambda: part.exists() and part.stat().st_size > 90_000), killed.said()
        killed.send()
        assert killed.wait() == -9
    assert files(root) == [] and ranges(server) == [0]
    there = part.stat().st_size
    splits = open_splits(section(root, name="flowers", download=True), labelled=True)
    assert ranges(server) == [there, 0, 0] and len(splits.train) == 4


def test_what_is_said(flowers, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    fetch(flowers, tmp_path / "root")
    assert [record.getMessage() for record in caplog.records] == ["unpacking 102flowers.tgz"]
