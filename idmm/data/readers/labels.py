"""A user's tree of images whose classes stand in a CSV file, not in the names of folders."""

import logging
import os
from dataclasses import replace

import numpy as np

from idmm.data.readers.folder import PARTS, UNLABELLED, images_under
from idmm.data.split import Listing, Split, arranged, counted
from idmm.data.user_lists import BadList, UserList, composed
from idmm.errors import listed

log = logging.getLogger(__name__)
FIELD = "data.labels"


def read_with_labels(root: str, file: str, labelled: bool) -> Listing:
    """Reads the images under ROOT with the classes of a CSV file of path,class.

    Its column ``split`` (train, val or test) says what an image is for; without one the folders of these names do,
    where ROOT has a ``train`` folder, else all images are to train on. Images without a row (never those of the folders
    val and test) are ``unlabelled``, or in train without labels where labels are not wanted; those of the folder
    ``unlabelled`` beside train are always ``unlabelled``.

    Raises:
        BadList: The file has bad lines, or no class, or no image to train on; or classes to evaluate on that are not
            trained on.
    """
    images = images_under(root)
    inside = "train/" if os.path.isdir(os.path.join(root, "train")) else ""
    rows = _rows(root, file, images, folders=bool(inside))

    def split(names: list[str], classes: list[str] | None) -> Split:
        items = [os.path.join(root, *name.split("/")) for name in names]
        whole = Split(items, names, None, None, "" if len(names) == len(images) else FIELD)
        if classes is None:
            return whole
        labels = np.searchsorted(classes, [rows[name]["class"] for name in names])
        groups = np.array([rows[name]["group"] for name in names]) if "group" in rows[names[0]] else None
        return replace(whole, labels=labels, classes=classes, groups=groups)

    of_part = {part: [name for name in images if name in rows and rows[name]["split"] == part] for part in PARTS}
    classes = {part: {rows[name]["class"] for name in names} for part, names in of_part.items()}
    wrong = _class_faults(file, classes)
    unnamed = [name for name in images if name not in rows]
    more = [name for name in unnamed if inside and name.startswith(f"{UNLABELLED}/")]
    free = {name for name in unnamed if name.startswith(inside)}
    train = [name for name in images if name in free or (name in rows and rows[name]["split"] == "train")]
    if not labelled and train and (wrong or free):
        return Listing(split(train, None), None, None, unlabelled=split(more, None) if more else None)
    if wrong:
        raise BadList(*wrong)
    if unnamed:
        what = f"{len(unnamed)} of {counted(len(images), 'image')}"
        log.info("%s: '%s' has no row for %s, which are left out where labels are needed", FIELD, file, what)
    more = sorted([*free, *more])
    ordered = sorted(classes["train"])
    splits = arranged({part: split(names, ordered) for part, names in of_part.items() if names})
    return replace(splits, unlabelled=split(more, None) if more else None)


def _rows(root: str, file: str, images: list[str], folders: bool) -> dict[str, dict[str, str]]:
    """Returns what the file says of images, by name: class, split and, where it has that column, group.

    ``folders``: Where it has no column split, the folders train, val and test say that.
    """
    given, rows, line_of = UserList(FIELD, file, images, root), {}, {}
    for line, cells in given.table(("path", "class"), ("split", "group")):
        name = given.find(line, cells["path"])
        if name in rows:
            given.fault(line, f"'{name}' is in line {line_of[name]}, too; wanted one row an image")
        elif name is not None:
            part = cells.get("split", name.partition("/")[0] if folders else "train").lower()
            if part not in PARTS and "split" in cells:
                given.fault(line, f"the split is '{cells['split']}'; wanted train, val or test")
            elif part not in PARTS:
                given.fault(line, f"'{name}' lies outside of train, val and test; wanted a column split")
            rows[name], line_of[name] = {**cells, "class": composed(cells["class"]), "split": part}, line
    given.refuse()
    return rows


def _class_faults(file: str, classes: dict[str, set[str]]) -> list[str]:
    train = classes["train"]
    if not train:
        return [f"{FIELD}: '{file}' has no image to train on; wanted rows of the split train"]
    faults = []
    if len(train) == 1:
        faults.append(f"{FIELD}: '{file}' has one class to train on ('{min(train)}'); wanted two or more")
    for part in ("val", "test"):
        if extra := sorted(classes[part] - train):
            faults.append(f"{FIELD}: '{file}' has classes in {part} that train lacks: {listed(extra)}")
    return faults
