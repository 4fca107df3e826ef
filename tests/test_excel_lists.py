"""Lists as spreadsheets and text editors save them: what is clear is read, anything else costs one
line."""

import csv
import os
import shutil

import pytest
from folders import section, tree
from helpers import call, refused

from idmm.data.listing import list_images
from idmm.data.user_lists import class_rows
from idmm.files import read_csv, write_csv

pytestmark = pytest.mark.usefixtures("own_cache")
SAVE = "Save it as 'CSV UTF-8', e.g. in Excel"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tree(
        tmp_path_factory.mktemp("excel") / "d",
        scans={"löwe": 3, "bär": 3},
        more={"x": 1},
    )


def table(root, delimiter=",", path="scans/{}/{}.png"):
    rows = [(path.format(name, i), name, "train") for name in ("löwe", "bär") for i in range(3)]
    return "".join(f"{delimiter.join(row)}\r\n" for row in [("Path", "CLASS", " Split "), *rows])


FORMS = {
    "semicolons": lambda text: text.replace(",", ";").encode("utf-8-sig"),
    "a line sep": lambda text: ("sep=;\r\n" + text.replace(",", ";")).encode("utf-8-sig"),
    "tabs": lambda text: text.replace(",", "\t").encode(),
    "Unicode text": lambda text: text.replace(",", "\t").encode("utf-16"),
    "old line ends": lambda text: text.replace("\r\n", "\r").encode(),
    "empty rows and columns": lambda text: (
        text.replace(",train", ",train,,").replace("\r\n", "\r\n,,,\r\n")
    ).encode(),
    "backslashes": lambda text: text.replace("/", "\\").encode(),
    "no ending": lambda text: text.replace(".png", "").encode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_that_are_clear(form, root, tmp_path):
    """Each is read as classes, and as groups."""
    (tmp_path / "labels.csv").write_bytes(FORMS[form](table(root)))
    train = list_images(
        section(root, labels=str(tmp_path / "labels.csv")),
        True,
        evaluated=False,
    ).train
    assert train.classes == ["bär", "löwe"]
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert train.names == [f"scans/{name}/{i}.png" for name in ("bär", "löwe") for i in range(3)]
    groups = FORMS[form](table(root).replace("CLASS", "Group"))
    (tmp_path / "groups.csv").write_bytes(groups)
    lists = {name: str(tmp_path / f"{name}.csv") for name in ("labels", "groups")}
    train = list_images(section(root / "scans/..", **lists), True, evaluated=False).train
    assert train.groups.tolist() == ["bär"] * 3 + ["löwe"] * 3


def test_names_without_folder_or_ending_in_every_list(tmp_path):
    root = tree(tmp_path / "d", train={"a": 2, "b": 2}, test={"a": 1, "b": 1})
    for place in ("train/a", "train/b", "test/a"):
        shutil.copy(
            root / "train/a/0.png",
            root / place / f"{place.replace('/', '-')}.png",
        )
    file = tmp_path / "out.txt"
    file.write_bytes("train-a.png\ntrain-b\r\ntest-a.png\n".encode("utf-16"))
    data = section(root, exclude=str(file))
    assert list_images(data, labelled=True).excluded == 3
    # pretraining does not list test images then, but may be given the list
    shutil.rmtree(root / "test/b")
    assert list_images(data, labelled=False).excluded == 2
    call(f"data check --root {root} --exclude {file} --out {tmp_path}/c")
    assert (tmp_path / "c/exclude.txt").read_text().startswith("train-a.png\ntrain-b")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (
            table(None).encode("cp1252"),
            f"'FILE' is not UTF-8 text, expected a CSV file of path,class. {SAVE}",
        ),
        (
            table(None).encode("utf-16-le"),
            f"'FILE' is not UTF-8 text, expected a CSV file of path,class. {SAVE}",
        ),
        (
            b"PK\3\4\x14\0\6\0",
            f"'FILE' is not UTF-8 text, expected a CSV file of path,class. {SAVE}",
        ),
        (
            b"path,class,Class\nx,a,b\n",
            "the header of 'FILE' has class twice, expected one column",
        ),
        (
            b"path,class\nscans/b\xc3\xa4r/0.png,red, green\n",
            "FILE:2: has 3 cells, expected 2 as in the header",
        ),
        (
            b"path,class\n0.png,a\n",
            "FILE:2: '0.png' fits more/x/0.png, scans/bär/0.png, scans/löwe/0.png, exp",
        ),
        (
            b"\x1b[31mpath,kind\n",
            "the header of 'FILE' lacks path, class, expected path,class. Its first line is"
            " '\\x1b[31mpath,kind'",
        ),
        (
            b'path,class\nx,"' + b"a" * 200_000 + b'"\n',
            "FILE:2: is not CSV (field larger than field limit (131072)), expected path,class",
        ),
    ],
)
def test_forms_that_are_not_clear_cost_one_line(content, line, root, tmp_path, capsys):
    file = tmp_path / "labels.csv"
    file.write_bytes(content)
    lines = refused(
        capsys,
        f"finetune --data.root {root} --data.labels {file} --out {tmp_path}/r",
    )
    assert len(lines) == 1
    assert lines[0].startswith(f"data.labels: {line.replace('FILE', str(file))}")


ENDS = [
    "two\nlines.png",
    "old\rmac.png",
    "dos\r\n.png",
    "\x1b[31mred.png",
    "#a\nb.png",
]
ENDS += [
    '"quoted", 1.png',
    "#1.png",
    "tab\t.png",
    "back\\slash.png",
    os.fsdecode(b"caf\xe9.png"),
]


def test_names_with_line_ends_come_back_from_every_list(tmp_path, capfd):
    root = tree(tmp_path / "d", train={"a": 3, "b": 3}, test={"a": 1, "b": 1})
    for i, name in enumerate(ENDS):
        (root / "train/a" / name).write_bytes(b"")  # broken, so that the list leaves it out
        shutil.copy(root / "train/b/0.png", root / f"{i}.png")
        (root / f"{i}.png").rename(root / "train/b" / name.replace(".png", "copy.png"))
    assert call(f"data check --root {root} --out {tmp_path}/c") == 1
    assert "\x1b" not in "".join(capfd.readouterr())
    lines = (tmp_path / "c/exclude.txt").read_bytes().splitlines()
    assert sum(not line.startswith(b"#") for line in lines) == 2 * len(ENDS)
    left = list_images(section(root, exclude=str(tmp_path / "c/exclude.txt")), labelled=True)
    assert left.excluded == 2 * len(ENDS)
    plain = list_images(section(root), labelled=True)
    write_csv(tmp_path / "own.csv", class_rows(plain.parts))
    again = list_images(section(root, labels=str(tmp_path / "own.csv")), labelled=True)
    assert again.train.names == plain.train.names
    with open(
        tmp_path / "own.csv",
        newline="",
        encoding="utf-8",
        errors="surrogateescape",
    ) as file:
        assert list(csv.DictReader(file)) == read_csv(tmp_path / "own.csv")
