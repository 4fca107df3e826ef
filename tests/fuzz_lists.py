"""Malformed lists of people's own images: classes and splits, groups, images to leave out, and folders of odd names.

The command stops when the images are to be decoded.
"""

import contextlib
import csv
import io
import os
import shutil
from unittest import mock

from folders import paint
from fuzz import TEXTS, Case, Done, damaged, family, pick, replace, strange

CLASSES = ["cat", "dög"]
ENCODINGS = [*["utf-8"] * 20, "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "cp1252", "utf-32", "utf-7"]


@contextlib.contextmanager
def until_decoding():
    """Stop the command when its images are listed."""
    from idmm.stages import common

    with mock.patch.object(common, "store_run_images", side_effect=Done):
        yield


@family(2500)
def lists(folder, rng):
    """CSV files and lists with bad cells, rows, headers, forms, encodings and bytes, and odd folders."""
    root = folder / "d"
    names = [f"{part}/{i}-{name}.png" for part in ("train", "test") for name in CLASSES for i in range(3)]
    if rng.random() < 0.2:
        names.append(odd_name(rng))
    for seed, name in enumerate(names):
        paint(root / name, seed)
    rows = [["path", "class", "split", "group"]]
    rows += [[name, CLASSES["dög" in name], name.partition("/")[0], name[-9:]] for name in names]
    kind = pick(rng, ["labels", "labels", "labels", "groups", "exclude"])
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
        replace(files[kind], spoilt_text(table(rows).decode("utf-8", "surrogatepass"), rng))
    if rng.random() < 0.1:
        strange_folder(root, rng)
    out = folder / "out"
    words = [word for key, file in files.items() for word in (f"--data.{key}", file)]
    argv = ["probe", root, "--model.name", "hog", "--size", 16, "--out", out, *words]
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
    kind = pick(rng, ["cell"] * 4 + ["name", "name", "cut", "longer", "twice", "gone", "empty", "column", "header"])
    if kind == "cell" and row:
        row[place] = str(strange(rng))
    elif kind == "name" and row:
        name = row[0]
        short = name.rpartition("/")[2]
        names = [short, short[:-4], name[:-4], name.replace("/", "\\"), f"/x/{name}", f"../d/{name}", f" {name} "]
        row[0] = pick(rng, [*names, name.upper(), f"{name}\r", "train", "", ".", name + "\0", "../../etc/hostname"])
    elif kind == "cut":
        del row[place:]
    elif kind == "longer":
        row += pick(rng, [["", ""], ["x"], ["class"], ["path"]])
    elif kind == "twice":
        rows.append([*row])
    elif kind == "gone":
        rows.remove(row)
    elif kind == "empty":
        rows.insert(int(rng.integers(len(rows) + 1)), pick(rng, [[], [""], ["", "", ""], ["sep=;"]]))
    elif kind == "column":
        for one in rows:
            del one[place : place + 1]
    elif rows:
        rows[0] = pick(rng, [["Path", " CLASS "], ["path", "class", "Class"], ["file", "label"], [], ["path"] * 2, row])
    if not rows:
        rows.append([])


def spoilt_text(text, rng):
    """Return a table as other programs save it, or damaged."""
    kind = pick(rng, ["plain"] * 3 + ["delimiter", "delimiter", "ends", "quotes", "long", "bytes", "bytes", "workbook"])
    if kind == "delimiter":
        text = pick(rng, ["", "", "sep=;\n"]) + text.replace(",", pick(rng, [";", "\t", "|", ", ", ";;"]))
    elif kind == "ends":
        text = text.replace("\r\n", pick(rng, ["\n", "\r", "\n\n", "\r\r\n", "\u2028", ""]))
    elif kind == "quotes":
        text = text.replace(",", pick(rng, ['"', '","', '",', "','"]))
    elif kind == "long":
        text += pick(rng, ["x" * 200_000, "," * 5000, "train/0-cat.png,cat\r\n" * 2000, "\r\n" * 5000])
    content = text.encode(pick(rng, ENCODINGS), "replace")
    if kind == "bytes":
        return damaged(content, rng)
    return pick(rng, [b"PK\3\4", b"\xd0\xcf\x11\xe0", b"%PDF-1.7", b"\0"]) + content if kind == "workbook" else content


def strange_place(path, rng):
    """Put something else than a file of text in its place."""
    path.unlink(missing_ok=True)
    kind = pick(rng, ["nothing", "folder", "itself", "empty", "locked", "device"])
    if kind == "folder":
        path.mkdir()
    elif kind == "itself":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/null")
    elif kind != "nothing":
        path.write_bytes(b"" if kind == "empty" else b"path,class\n")
        path.chmod(0 if kind == "locked" else 0o600)


def strange_folder(root, rng):
    """Add links, pipes and folders to the images."""
    kind = pick(rng, ["loop", "test", "pipe", "itself", "gone", "folder", "empty"])
    place = root / "train/odd.png"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    elif kind == "empty":
        shutil.rmtree(root / "test")
    else:
        targets = {"loop": root, "test": root / "test", "itself": place, "gone": root / "gone.png"}
        place.symlink_to(targets[kind])
