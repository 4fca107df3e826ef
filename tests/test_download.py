"""Datasets are fetched from a server on loopback that fails, breaks off and stalls."""

import dataclasses
import json
import os

import pytest
from folders import faults, section
from helpers import Process, call, call_ok
from loopback import miniature
from official_trees import BUILD, advice, opened

from idmm.data import registry
from idmm.data.listing import list_images
from idmm.data.registry import DATASETS, fetch
from idmm.errors import RunError

FETCHED = [name for name, row in DATASETS.items() if row.archives]
AGAIN = "The same command tries again, and keeps the files that are whole"


def fails(row, root):
    """The line of the RunError that fetching ends with; nothing is in place."""
    with pytest.raises(RunError) as caught:
        fetch(row, root)
    assert "\n" not in str(caught.value)
    assert not [p for p in root.iterdir() if not p.name.startswith(".idmm")]
    return str(caught.value)


def listed_images(root):
    fetch(DATASETS["indoor67"], root)
    splits = list_images(section(root, name="indoor67"), labelled=True)
    assert (len(splits.train), len(splits.test)) == (3, 2)


@pytest.mark.parametrize("name", FETCHED)
def test_every_dataset_opens_from_what_was_fetched(
    name, server, monkeypatch, tmp_path, any_checksum
):
    monkeypatch.setitem(DATASETS, name, miniature(server, name, tmp_path / "source"))
    fetch(DATASETS[name], tmp_path / "root")
    fetched = list_images(section(tmp_path / "root", name=name), labelled=True)
    assert server.asked == [f"/{name}/{os.path.basename(url)}" for url in DATASETS[name].archives]
    source = list_images(section(tmp_path / "source", name=name), labelled=True)
    for part, split in source.parts.items():
        copy = fetched.parts[part]
        assert (copy.names, copy.classes) == (split.names, split.classes)
        assert copy.labels.tolist() == split.labels.tolist()
    assert not (tmp_path / "root/.idmm").exists()


def test_nothing_is_fetched_twice_and_the_users_own_files_stay(indoor67, server, tmp_path):
    root = tmp_path / "root"
    mine = root / "indoorCVPR_09/Images/gameroom/mine.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_text("my own")
    listed_images(root)
    listed_images(root)
    fetch(indoor67, root)
    assert len(server.asked) == 3
    assert mine.read_text() == "my own"
    (root / "indoorCVPR_09/Images/gameroom/g_1.jpg").unlink()  # half of it is gone
    listed_images(root)
    assert mine.read_text() == "my own"


def test_the_command(indoor67, server, tmp_path, capsys):
    argv = f"data download indoor67 --root {tmp_path}/root"
    server.orders = [{"status": 404}]
    assert call(argv) == 1
    line = (
        f"{next(iter(indoor67.archives))}: cannot be fetched (HTTPError: HTTP Error 404: "
        f"Not Found). {AGAIN}"
    )
    assert line in capsys.readouterr().err.splitlines()
    call_ok(argv)
    assert capsys.readouterr().out == "indoor67: 3 train, 2 test, all as in the protocol\n"
    server.asked.clear()
    call_ok(argv)
    assert server.asked == []


@pytest.mark.parametrize("name", [name for name, row in DATASETS.items() if row.manual])
def test_datasets_behind_a_login_say_how_to_get_them(name, tmp_path):
    line = f"{name} cannot be downloaded: {DATASETS[name].manual}"
    assert faults(fetch, DATASETS[name], tmp_path / "a") == [f"data.name: {line}"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("order", [{"cut": 10}, {"status": 503}, {"stall": 10}])
def test_a_broken_connection(order, indoor67, server, monkeypatch, tmp_path):
    monkeypatch.setattr(registry, "TIMEOUT", 0.3 if "stall" in order else 10.0)
    server.orders = [{}, order]
    root = tmp_path / "root"
    line = fails(indoor67, root)
    assert line.startswith(f"{list(indoor67.archives)[1]}: cannot be fetched (")
    assert line.endswith(f". {AGAIN}")
    server.asked.clear()
    listed_images(root)
    assert len(server.asked) == 2, "the first file was whole"


def test_a_wrong_checksum_and_a_damaged_archive(indoor67, server, tmp_path):
    (first, _), *others = indoor67.archives.items()
    wrong = dataclasses.replace(indoor67, archives={first: 32 * "0", **dict(others)})
    assert "corrupted" in fails(wrong, tmp_path / "a")
    page = server.archive("/x/page.tar", b"<html>moved</html>")
    damaged = dataclasses.replace(indoor67, archives=dict([page, *others]))
    assert "ReadError" in fails(damaged, tmp_path / "b")


def test_a_root_that_cannot_be_written(indoor67, tmp_path):
    (tmp_path / "file").touch()
    (line,) = faults(fetch, indoor67, tmp_path / "file")
    assert line.startswith(f"data.root: cannot write to '{tmp_path}/file' (")
    assert line.endswith(", expected a folder")


@pytest.mark.parametrize("name", ["flowers", "cifar10", "cifar100", "svhn"])
def test_other_files_than_the_publishers(name, tmp_path):
    """Their checksums are verified before anything is read: a pickle may run anything."""
    BUILD[name](tmp_path)
    line = f"data.root: files in '{tmp_path}' are damaged (a checksum differs). Fetch them again"
    assert faults(opened, name, tmp_path) == [line, advice(name, tmp_path)]


SCRIPT = """
import dataclasses, json, logging, sys
from idmm.data.registry import DATASETS, fetch

logging.basicConfig(level=logging.INFO)
root, archives = json.loads(sys.argv[1])
free = dict.fromkeys(["num_classes", "train_size", "test_size"])
DATASETS["indoor67"] = dataclasses.replace(DATASETS["indoor67"], archives=archives, **free)
fetch(DATASETS["indoor67"], root)
"""


def process(row, root, error):
    """A real process that fetches indoor67."""
    return Process(["-c", SCRIPT, json.dumps([str(root), row.archives])], error)


def test_a_killed_process_leaves_nothing_half(indoor67, server, tmp_path):
    root = tmp_path / "root"
    server.orders = [{}, {"stall": 10}]
    with process(indoor67, root, tmp_path / "error") as killed:
        assert killed.until(lambda: len(server.asked) == 2), killed.said()
        killed.send()
        assert killed.wait() == -9
    assert all(path.name.startswith(".idmm") for path in root.iterdir())
    server.asked.clear()
    listed_images(root)
    assert len(server.asked) == 2
