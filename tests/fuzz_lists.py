"""Malformed lists of people's own images: classes and splits, groups, images to leave out, and
folders of odd names.

The command stops when the images are to be decoded.
"""

import contextlib
import csv
import io
from unittest import mock

from folders import paint
from fuzz import (
    TEXTS,
    Case,
    Done,
    damaged,
    family,
    pick,
    replace,
    strange,
    strange_place,
)

CLASSES = ["cat", "dög"]
ENCODINGS = 20 * "utf-8 " + "utf-8-sig utf-16 utf-16-le utf-16-be cp1252 utf-32 utf-7"


@contextlib.contextmanager
def until_decoding():
    """Stop the command when its images are listed."""
    from idmm.training.run import Run

    with mock.patch.object(Run, "store", side_effect=Done):
        yield


@family(2500)
def lists(folder, rng):
    """CSV files and lists with bad cells, rows, headers, forms, encodings and bytes, and odd
    folders."""
    root = folder / "d"
    names = []
    for part in ("train", "test"):
        for name in CLASSES:
            names += [f"{part}/{i}-{name}.png" for i in range(3)]
    if rng.random() < 0.2:
        names.append(odd_name(rng))
    for seed, name in enumerate(names):
        paint(root / name, seed)
    rows = [["path", "class", "split", "group"]]
    rows += [[name, CLASSES["dög" in name], name.partition("/")[0], name[-9:]] for name in names]
    kind = pick(rng, "labels labels labels groups exclude")
    files = {"labels": folder / "labels.csv"}
    replace(files["labels"], table(rows))
    if kind == "exclude":
        rows = [row[:1] for row in rows[1:4]]
    if kind == "groups":
        rows = [[row[0], row[3]] for row in rows]
    files[kind] = folder / f"{kind}.csv"
    for _ in range(int(rng.integers(0, 3))):
        spoil_rows(rows, rng)
    if rng.random() < 0.1:
        strange_place(files[kind], rng)
    else:
        replace(
            files[kind],
            spoilt_text(table(rows).decode("utf-8", "surrogatepass"), rng),
        )
    if rng.random() < 0.1:
        strange_folder(root, rng)
    out = folder / "out"
    words = [word for key, file in files.items() for word in (f"--data.{key}", file)]
    argv = [
        "probe",
        root,
        "--model.name",
        "hog",
        "--size",
        16,
        "--out",
        out,
        *words,
    ]
    return Case(argv, [out / "result.json"], until_decoding)


def table(rows):
    """Return rows as CSV."""
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue().encode("utf-8", "surrogatepass")


def odd_name(rng):
    """Return the name of an image that a file system can hold."""
    text = pick(rng, TEXTS)[:60].replace("\0", "").replace("/", "").replace("\ud800", "\udce9")
    return f"train/{text}cat.png"


def spoil_rows(rows, rng):
    """Change a cell, a row, a column or the header, in place."""
    row = pick(rng, rows)
    place = int(rng.integers(len(row))) if row else 0
    kind = pick(rng, "cell cell cell cell name name cut longer empty header")
    if kind == "cell" and row:
        row[place] = str(strange(rng))
    elif kind == "name" and row:
        name = row[0]
        short = name.rpartition("/")[2]
        names = [
            short,
            short[:-4],
            name[:-4],
            name.replace("/", "\\"),
            name.upper(),
        ]
        names += [
            f"/x/{name}",
            f"../d/{name}",
            f" {name} ",
            f"{name}\r",
            f"{name}\0",
        ]
        row[0] = pick(rng, [*names, "train", "", ".", "../../etc/hostname"])
    elif kind == "cut":
        del row[place:]
    elif kind == "longer":
        row += pick(rng, [["", ""], ["x"], ["class"], ["path"]])
    elif kind == "empty":
        place = int(rng.integers(len(rows) + 1))
        rows.insert(place, pick(rng, [[], [""], ["", "", ""], ["sep=;"]]))
    else:
        headers = [
            "Path, CLASS ",
            "path,class,Class",
            "file,label",
            "path,path",
            ",".join(row),
        ]
        rows[0] = pick(rng, headers).split(",")


def spoilt_text(text, rng):
    """Return a table as other programs save it, or damaged."""
    kind = pick(rng, "plain plain plain delimiter delimiter ends long bytes bytes")
    if kind == "delimiter":
        text = text.replace(",", pick(rng, [";", "\t", "|", ", ", ";;"]))
        text = pick(rng, ["", "", "sep=;\n"]) + text
    elif kind == "ends":
        text = text.replace("\r\n", pick(rng, ["\n", "\r", "\n\n", "\r\r\n", "\u2028", ""]))
    elif kind == "long":
        row = "train/0-cat.png,cat\r\n"
        text += pick(rng, ["x" * 200_000, "," * 5000, row * 2000, "\r\n" * 5000])
    content = text.encode(pick(rng, ENCODINGS), "replace")
    return damaged(content, rng) if kind == "bytes" else content


def strange_folder(root, rng):
    """Add links, pipes and folders to the images."""
    (root / "train/link.png").symlink_to(pick(rng, [root, root / "test", root / "gone.png"]))
    strange_place(pick(rng, [root / "train/odd.png", root / "test"]), rng)
