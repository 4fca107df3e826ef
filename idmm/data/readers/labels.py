"""A user's tree of images whose classes stand in a CSV file, not in the names of folders."""

import logging
import os
from dataclasses import dataclass

import numpy as np

from idmm.data.readers.folder import PARTS, images_under
from idmm.data.split import Split, Splits, arranged, counted
from idmm.data.user_lists import BadList, Names, Row, composed, no_image, read_table, refuse
from idmm.errors import listed

log = logging.getLogger(__name__)
FIELD = "data.labels"


@dataclass(frozen=True)
class _Labels:
    """What the file says of the images, by their names under the root."""

    root: str
    images: list[str]  # all there are, in order
    rows: dict[str, Row]
    part: dict[str, str]  # train, val or test of the images with a row

    def split(self, names: list[str], classes: list[str] | None) -> Split:
        """Some images; without labels where there are no classes."""
        items = [os.path.join(self.root, *name.split("/")) for name in names]
        drawn = "" if len(names) == len(self.images) else FIELD
        if classes is None:
            return Split(items, names, None, None, drawn)
        index = {name: i for i, name in enumerate(classes)}
        cells = [self.rows[name].cells for name in names]
        labels = np.array([index[composed(cell["class"])] for cell in cells], dtype=np.int64)
        groups = np.array([cell["group"] for cell in cells]) if all("group" in cell for cell in cells) else None
        return Split(items, names, labels, classes, drawn, groups)


def read_with_labels(root: str, file: str, labelled: bool) -> Splits:
    """Reads the images under ROOT with the classes of a CSV file of path,class.

    Its column ``split`` (train, val or test) says what an image is for; without one the folders of these names do,
    where ROOT has a ``train`` folder, else all images are to train on. Images without a row are left out, or come
    along without labels where labels are not wanted (never those of val and test).

    Raises:
        BadList: The file has bad lines, or no class, or no image to train on; or classes to evaluate on that are not
            trained on.
    """
    found = _read(root, file)
    of_part = {part: [n for n in found.images if found.part.get(n) == part] for part in PARTS}
    classes = {part: {composed(found.rows[n].cells["class"]) for n in names} for part, names in of_part.items()}
    wrong = _class_faults(file, classes)
    inside = "train/" if os.path.isdir(os.path.join(root, "train")) else ""
    train = [n for n in found.images if found.part.get(n, "train" if n.startswith(inside) else "") == "train"]
    if not labelled and train and (wrong or len(train) > len(of_part["train"])):
        return Splits(found.split(train, None), None, None)
    if wrong:
        raise BadList(*wrong)
    if left := len(found.images) - len(found.rows):
        what = f"{left} of {counted(len(found.images), 'image')}"
        log.info("%s: '%s' has no row for %s, which are left out", FIELD, file, what)
    ordered = sorted(classes["train"])
    return arranged({part: found.split(names, ordered) for part, names in of_part.items() if names})


def _read(root: str, file: str) -> _Labels:
    images = images_under(root)
    names, faults, rows, part = Names(images, root), [], {}, {}
    has_train = os.path.isdir(os.path.join(root, "train"))
    for row in read_table(FIELD, file, ("path", "class"), ("split", "group")):
        text, where = row.cells["path"], f"{FIELD}: {file}:{row.line}:"
        name = names.find(text)
        if name is None:
            faults.append(no_image(FIELD, file, row.line, text, names))
            continue
        if name in rows:
            faults.append(f"{where} '{name}' is in line {rows[name].line}, too; wanted one row an image")
            continue
        rows[name] = row
        part[name] = row.cells.get("split", name.partition("/")[0] if has_train else "train").lower()
        if part[name] not in PARTS and "split" in row.cells:
            faults.append(f"{where} the split is '{row.cells['split']}'; wanted train, val or test")
        elif part[name] not in PARTS:
            faults.append(f"{where} '{name}' lies outside of train, val and test; wanted a column split")
    refuse(FIELD, faults)
    return _Labels(root, images, rows, part)


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
