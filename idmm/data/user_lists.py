"""Lists that people keep of their own images: classes, groups, images to leave out."""

import logging
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from os.path import exists, isdir, join
from typing import NamedTuple

import numpy as np

from idmm.data.folder import PARTS, UNLABELLED, images_under
from idmm.data.list_file import UserList
from idmm.data.split import Groups, Listing, Split, arranged, class_of, names_of, split_of
from idmm.errors import Fault, UserError
from idmm.files import expand_home
from idmm.text import counted, listed, one_line

log = logging.getLogger(__name__)

SPLIT = "split.csv"  # list of a run's images with their classes and splits
# uses of an image, besides the splits and UNLABELLED: to train on without a label, to evaluate on
# once it has one
_TRAIN_WITHOUT = "train without label"
_ASIDE = "aside"


# ---------------------------------------------------------------------- classes
class _Labelled(NamedTuple):
    """A row of a list of classes."""

    place: str  # its line
    label: str  # empty: it has none yet
    split: str
    group: str | None  # None: the list has no groups


def read_with_labels(
    root: str, file: str, labelled: bool, least_classes: int | None = None
) -> Listing:
    """Read the images under ROOT with the classes of a CSV file of path,class, or a folder of such.

    Its column ``split`` (train, val or test) gives each image's split. Without one the folders of
    these names do if ROOT has a ``train`` folder, else all images are to train on. Images without a
    row (never those of the folders val and test) or class are ``unlabelled``, or in train without
    labels if labels are not needed. Those without a class for val or test are put ``aside``.

    Args:
        root: The folder of the images.
        file: The file or folder.
        labelled: Whether labels are needed.
        least_classes: As for :func:`idmm.data.listing.list_images`.

    Raises:
        UserError: The file has bad lines, or no class, or no image to train on. Or classes to
            evaluate on that are not trained on.
    """
    images = images_under(root)
    has_parts = isdir(join(root, "train"))
    rows = _label_rows(file, images, root, has_parts)
    names: dict[str, list[str]] = defaultdict(list)
    for name in images:
        names[_use_of(name, rows.get(name), has_parts)].append(name)
    without_label = names[_TRAIN_WITHOUT]
    more = names[UNLABELLED]
    aside = names[_ASIDE]
    trained = set(names["train"] + without_label)
    classes = sorted({rows[name].label for name in names["train"]})
    faults = []
    if least_classes is None or len(classes) < least_classes:
        faults = _class_faults(file, rows.values(), classes)
    elif labelled:
        classes = sorted({row.label for row in rows.values()} - {""})
    if not labelled and trained and (faults or without_label):
        train = [name for name in images if name in trained]
        return Listing(_part(root, train), unlabelled=_part(root, more) or None, aside=tuple(aside))
    if faults:
        raise UserError(*faults)
    if without := len(images) - sum(len(names[part]) for part in PARTS):
        total = counted(len(images), "image")
        log.info(f"data.labels: '{file}' has no class for {without} of {total}")
    splits = {}
    for part in PARTS:
        if names[part] or part == "train":
            splits[part] = _part_with_labels(root, names[part], rows, classes)
    unlabelled = _part(root, sorted([*without_label, *more]))
    return replace(arranged(splits), unlabelled=unlabelled or None, aside=tuple(aside))


def _use_of(name: str, row: _Labelled | None, has_parts: bool) -> str:
    """Return the split of an image, or what else it is for. Empty: it is left out."""
    folder = name.partition("/")[0]
    if row is not None and row.label:
        return row.split
    if row is not None and row.split != "train":
        return _ASIDE
    if has_parts and folder == UNLABELLED:
        return UNLABELLED
    if row is not None or folder == "train" or not has_parts and folder not in PARTS:
        return _TRAIN_WITHOUT
    return ""


def _part_with_labels(
    root: str, names: list[str], rows: Mapping[str, _Labelled], classes: list[str]
) -> Split:
    """Return named images with the classes of their rows, and their groups if they have some."""
    numbers = {label: number for number, label in enumerate(classes)}
    labels = [numbers[rows[name].label] for name in names]
    groups = None
    if any(rows[name].group for name in names):
        groups = np.array([rows[name].group or name for name in names])
    return replace(split_of(root, names, labels, classes), groups=groups, whole=False)


def _class_faults(file: str, rows: Iterable[_Labelled], classes: list[str]) -> list[Fault]:
    """Return what is wrong with the ``classes`` to train on, and with those to evaluate on."""
    faults = []
    if not classes:
        return [
            Fault(
                "data.labels",
                f"'{file}' has no image with a class to train on, "
                "expected two or more classes in the split train",
            )
        ]
    if len(classes) == 1:
        faults.append(
            Fault(
                "data.labels",
                f"'{file}' has one class to train on ('{classes[0]}'), "
                "expected two or more classes in the split train",
            )
        )
    for part in PARTS[1:]:
        evaluated = {row.label for row in rows if row.split == part}
        if extra := sorted(evaluated.difference(classes, [""])):
            fault = f"'{file}' has classes in {part} that train lacks: {listed(extra)}"
            faults.append(Fault("data.labels", fault))
    return faults


def _part(root: str, names: list[str]) -> Split:
    return replace(split_of(root, names), whole=False)


def _label_rows(file: str, images: list[str], root: str, has_parts: bool) -> dict[str, _Labelled]:
    """Return the row of each image by name.

    ``has_parts``: Without a column split, the folders train, val and test are the splits.
    """
    rows: dict[str, _Labelled] = {}
    for path in _lists_in(file):
        table = UserList("data.labels", path, images, root)
        for line, cells in table.table(("path", "class"), ("split", "group"), ("class",)):
            name = table.find(line, cells["path"])
            if name is None:
                continue
            if name in rows:
                place = rows[name].place
                table.fault(line, f"'{name}' is in {place}, too, expected one row per image")
                continue
            part = "train"
            if "split" in cells:
                part = cells["split"].lower()
                if part not in PARTS:
                    table.fault(
                        line, f"the split is '{cells['split']}', expected train, val or test"
                    )
            elif has_parts and not name.startswith(f"{UNLABELLED}/"):
                part = name.partition("/")[0].lower()
                if part not in PARTS:
                    table.fault(
                        line, f"'{name}' is outside of train, val and test, expected a column split"
                    )
            place = f"line {line}"
            if path != file:
                place = f"{path}:{line}"
            rows[name] = _Labelled(place, class_of(cells["class"]), part, cells.get("group"))
        table.refuse()
    return rows


def _lists_in(file: str) -> list[str]:
    """Return the CSV files in a folder, or the file itself. UserError: the folder has none."""
    folder = expand_home(file)
    if not folder.is_dir():
        return [file]
    paths = sorted(map(str, folder.glob("*.csv")))
    if not paths:
        raise UserError.of("data.labels", f"'{file}' has no CSV file, expected some of path,class")
    return paths


def class_rows(parts: Mapping[str, Split], aside: Iterable[str] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the header of a list for ``data.labels`` and a row per image with a label.

    A row has path, class, split, and the group if there are groups. An image without a group is its
    own. The images ``aside`` have rows, too, of the split test and without a class.
    """
    columns = 3
    if any(split.groups is not None for split in parts.values()):
        columns = 4
    yield ("path", "class", "split", "group")[:columns]
    for part, split in parts.items():
        groups = split.names
        if split.groups is not None:
            groups = split.groups.tolist()
        for i, name in enumerate(split.names):
            label = split.class_name(i)
            if label is not None:
                yield (name, label, part, groups[i] or name)[:columns]
    for name in aside:
        yield (name, "", "test", name)[:columns]


# ---------------------------------------------------------------------- images to leave out
def leave_out(splits: Listing, file: str, root: str | None) -> Listing:
    """Return the splits without the images that a file names, one per line.

    ``excluded`` counts them. Empty lines and those that begin with '#' are skipped. A file in
    ``root`` that is in no split may be named, too: the list serves pretraining, which reads fewer
    of them.

    Raises:
        UserError: It cannot be read, names a missing image, or leaves a split without images.
    """
    names = UserList("data.exclude", file, names_of(splits.parts.values()), root)
    text = names.text("a file with the name of one image per line, as idmm data check writes it")
    excluded: set[str | None] = set()
    for i, line in enumerate(text.split("\n"), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            excluded.add(names.find(i, line, elsewhere=True))
    names.refuse()
    parts = {}
    counts = {}
    for key, part in splits.parts.items():
        parts[key] = without(part, excluded)
        counts[key] = len(part) - len(parts[key])
        if part and not parts[key] and key != "unlabelled":
            raise UserError.of(
                "data.exclude", f"'{file}' leaves no image of {key}, expected at least one"
            )
    total = sum(counts.values())
    by_part = ", ".join(f"{count} {key}" for key, count in counts.items())
    log.info(f"data.exclude: '{file}' leaves out {counted(total, 'image')} ({by_part})")
    return replace(splits.with_parts(parts), excluded=total)


def without(split: Split, names: Container[str | None]) -> Split:
    """Return the images of a split that are not named."""
    return split.take([i for i, name in enumerate(split.names) if name not in names])


def exclude_line(name: str) -> str:
    """Return the line for ``data.exclude`` that names an image."""
    if name.lstrip().startswith("#"):  # a comment
        name = f"./{name}"
    return one_line(name)


# ---------------------------------------------------------------------- groups
def with_groups(splits: Listing, groups: str, root: str | None) -> Listing:
    """Return the splits with each image's group. One without a label may have none: it is its own.

    Raises:
        UserError: As :func:`read_groups`, or images with labels are in no group.
    """
    group_of = read_groups(groups, names_of(splits.parts.values()), root)
    names = names_of([splits.train, *splits.evaluated])
    if missing := [name for name in names if not group_of.get(name)]:
        raise UserError.of(
            "data.groups",
            f"'{groups}' gives no group to {counted(len(missing), 'image')}: "
            f"{listed(missing, 3)}, expected one for each image",
        )
    parts = {}
    for key, part in splits.parts.items():
        names_of_groups = [group_of.get(name) or name for name in part.names]
        parts[key] = replace(part, groups=np.array(names_of_groups))
    return splits.with_parts(parts)


def read_groups(groups: str, names: list[str], root: str | None) -> dict[str, str]:
    """Return the group of each named image that has one, by a CSV (path,group) or a pattern's
    bracket.

    Raises:
        UserError: The file or the pattern is bad.
    """
    group_of: dict[str, str] = {}
    if not exists(groups) and set(groups) & set("()[]\\+*?^$|"):
        try:
            pattern = re.compile(groups)
            if pattern.groups != 1:
                raise re.error(f"{pattern.groups} brackets")
        except re.error as error:
            raise UserError.of(
                "data.groups",
                f"'{groups}' is no file and no pattern ({error}), expected a CSV file of "
                "path,group, or a pattern with one bracket, e.g. '(patient\\d+)_'",
            ) from None
        for name in names:
            if match := pattern.search(name):
                group_of[name] = match[1]
        return group_of
    table = UserList("data.groups", groups, names, root)
    for line, cells in table.table(("path", "group")):
        image = table.find(line, cells["path"], elsewhere=True)
        if image is None:
            continue
        known = group_of.setdefault(image, cells["group"])
        if known != cells["group"]:
            table.fault(line, f"'{image}' is of '{known}' already, expected one group per image")
    table.refuse()
    return group_of


def groups_of(groups: Groups) -> str:
    """Return ``12 groups``, of the name of each image's group, [N]."""
    return counted(len(np.unique(groups)), "group")
