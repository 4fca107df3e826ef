"""A user's folder of images: ROOT/train/CLASS/* and ROOT/val/CLASS/* (or test), or any tree."""

import functools
import logging
import os
import posixpath
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from os.path import dirname, isdir, islink, join, realpath
from pathlib import Path

from idmm.config import Data
from idmm.data.formats import SUFFIXES
from idmm.data.split import LabelsMissing, Listing, Split, arranged, class_of, split_of
from idmm.errors import Fault, UserError, checked, reason
from idmm.files import expand_home
from idmm.text import counted, listed

log = logging.getLogger(__name__)

PARTS = ("train", "val", "test")
UNLABELLED = "unlabelled"  # the folder of more images for pretraining, next to train
OTHER_SPLIT = "links to other splits"  # a kind of files that are not read


class FilesMissing(UserError):
    """Files of a dataset are missing or damaged: a download may help."""


def root_folder(data: Data) -> Path:
    """Return ``data.root``. FilesMissing if it is not given, missing, or no folder."""
    is_own = data.name == "folder"
    expected = "a folder of images"
    if not data.root:
        if not is_own:
            expected = f"its folder ('idmm data info {data.name}' shows it)"
        raise FilesMissing.of("data.root", f"missing, data.name '{data.name}' expects {expected}")
    root = expand_home(data.root)
    if isdir(root):
        return root
    if not is_own:
        expected = f"the folder that holds {data.name}"
    problem = "does not exist"
    if os.path.exists(root):
        problem = "is not a folder"
    raise FilesMissing.of("data.root", f"'{data.root}' {problem}, expected {expected}")


Parts = tuple[str, ...]  # of a path below the top of a tree


@dataclass
class _Tree:
    """The images under a folder, and what else there is."""

    path: str
    key: str = "data.root"  # of the config. Messages begin with it
    images: list[Parts] = field(default_factory=list)
    # endings of other files, and links to what is read without them
    others: Counter[str] = field(default_factory=Counter)
    folders: list[str] = field(default_factory=list)  # at its top
    places: set[str] = field(default_factory=set)  # real paths of all folders that were read

    @property
    def classes(self) -> list[str]:
        """Names of the folders at its top."""
        return sorted({class_of(name) for name in self.folders})

    @property
    def loose_images(self) -> list[str]:
        """Names of the images at its top."""
        return [parts[0] for parts in self.images if len(parts) == 1]

    @property
    def has_parts(self) -> bool:
        """Whether folders at its top are parts of a dataset, so that they cannot be classes."""
        return any(name.lower() in (*PARTS, UNLABELLED) for name in self.folders)

    @property
    def skipped(self) -> str:
        """Number and kinds of the other files."""
        kinds = listed(f"{count} {kind}" for kind, count in self.others.most_common())
        return f"{counted(self.others.total(), 'file')} of other kinds ({kinds})"

    def drop_empty_folders(self) -> None:
        """Forget the folders at its top that have no image."""
        filled = {parts[0] for parts in self.images}
        self.folders = [name for name in self.folders if name in filled]

    def no_images(self, expected: str) -> Fault:
        """Return the fault of a tree without images."""
        others = f", but {self.skipped}" if self.others else ""
        return Fault(self.key, f"'{self.path}' has no images{others}, expected {expected}")


# ---------------------------------------------------------------------- datasets
def read_labelled(
    root: str, parts: Sequence[str] = PARTS, least_classes: int | None = None
) -> Listing:
    """Read ROOT/train/CLASS/**, and the other ``parts`` likewise if they exist.

    Without ``train``, ROOT/CLASS/** is read. ``least_classes`` is as for
    :func:`idmm.data.listing.list_images`.

    Raises:
        LabelsMissing: No train folder, or one with a single class or none, and nothing else is
            wrong.
        UserError: Images outside of class folders, empty or differing classes, or one class only.
    """
    trees = _trees(root, parts) or {"train": _tree_of_classes(root)}
    train = trees["train"]
    classes = train.classes
    if least_classes is not None:
        every = {name for tree in trees.values() for name in tree.classes}
        classes = sorted(every)
        for tree in trees.values():
            tree.drop_empty_folders()
    faults = []
    for tree in trees.values():
        faults += _class_faults(tree)
    for tree in trees.values():
        if tree.images and train.images:  # else that is the fault
            faults += _missing_classes(train, tree)
            if least_classes is None:
                faults += _extra_classes(train, tree)
    if len(train.classes) == 1 and least_classes != 0:
        fault = f"'{train.path}' has one class only ('{train.classes[0]}'), expected two or more"
        faults.append(Fault("data.root", fault))
    if len(trees) == len(faults) == 1 and train.images and len(train.classes) < 2:
        raise LabelsMissing(*faults)
    if faults:
        raise UserError(*faults)
    return arranged({name: _split(root, tree, classes) for name, tree in trees.items()})


def _tree_of_classes(root: str) -> _Tree:
    """Return the images of ROOT itself. LabelsMissing: its folders cannot be classes."""
    tree = _walk(root)
    filled = {parts[0] for parts in tree.images}
    if len(filled) < 2 or tree.loose_images or tree.has_parts:
        expected = f"{root}/train/CLASS/*, or the classes in a CSV file (--data.labels)"
        if UNLABELLED in tree.folders:
            expected = f"the class folders in {root}/train, next to '{UNLABELLED}'"
        raise LabelsMissing.of("data.root", f"'{root}' has no 'train' folder, expected {expected}")
    log.info(
        f"data.root: '{root}' has no 'train' folder: its {len(tree.classes)} folders are taken for "
        f"classes ({listed(tree.classes)})"
    )
    return tree


def read_any(root: str) -> Listing:
    """Read the images of ROOT/train if it exists, else all under ROOT, with labels if it has some.

    val and test come along only if their classes are those of a labelled train folder.

    Raises:
        UserError: No image at all.
    """
    trees = _trees(root, PARTS) or {"train": _walk(root)}
    train = _not_empty(trees["train"])
    has_labels = len(train.classes) > 1 and all(len(parts) == 2 for parts in train.images)
    if not has_labels or _class_faults(train) or (train.path == root and train.has_parts):
        return Listing(_split(root, train))
    splits = {}
    for name, tree in trees.items():
        faults = _class_faults(tree) + _missing_classes(train, tree) + _extra_classes(train, tree)
        if not faults:
            splits[name] = _split(root, tree, train.classes)
    return arranged(splits)


def read_unlabelled(root: str) -> Split | None:
    """Read the images of ROOT/unlabelled/**, if it has any and ROOT/train exists."""
    if not all(isdir(join(root, name)) for name in (UNLABELLED, "train")):
        return None
    tree = _walk_parts(root, (UNLABELLED, *PARTS[1:]))[UNLABELLED]
    if tree.images:
        return _split(root, tree)
    return None


def images_under(root: str) -> list[str]:
    """Return the names of all images under ROOT, '/' between. UserError if there is none."""
    return ["/".join(parts) for parts in _not_empty(_walk(root)).images]


def _trees(root: str, parts: Sequence[str]) -> dict[str, _Tree]:
    """Return the folders of splits that there are. Nothing without ``train``."""
    if not isdir(join(root, "train")):
        return {}
    folders = {entry.name for entry in os.scandir(root) if entry.is_dir()}
    others = sorted(folders.difference(PARTS, [UNLABELLED]))
    if others := [name for name in others if not name.startswith(".")]:
        log.warning(
            f"data.root: '{root}': these folders next to train are not read: {listed(others)}"
        )
    return _walk_parts(root, parts)


def _walk_parts(root: str, parts: Sequence[str]) -> dict[str, _Tree]:
    """List those of the folders ROOT/PART that there are.

    Links from one to images of a later one are skipped.
    """
    trees: dict[str, _Tree] = {}
    later: set[str] = set()
    for name in reversed(parts):
        path = join(root, name)
        if isdir(path):
            trees[name] = _walk(path, later=later)
            later |= trees[name].places
    return dict(reversed(trees.items()))


def _not_empty(tree: _Tree) -> _Tree:
    if not tree.images:
        raise UserError(tree.no_images("at least one"))
    return tree


def _walk(top: str, key: str = "data.root", later: Set[str] = frozenset()) -> _Tree:
    """List a tree in a fixed order, without hidden files.

    Links are followed, after the folders of the tree, unless they lead to a folder that is read
    already, to one of ``later`` trees, or to one that contains ``top``.
    """
    tree = _Tree(top, key)
    errors = []
    home = realpath(top)
    folders: list[Parts] = [()]  # still to read
    links: list[Parts] = []
    while folders or links:
        parts = (folders or links).pop()
        path = join(top, *parts)
        real = realpath(path)
        if real in later:
            tree.others[OTHER_SPLIT] += 1
            continue
        contains_top = parts and os.path.commonpath([real, home]) == real
        if real in tree.places or contains_top:
            continue
        tree.places.add(real)
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            errors.append(Fault(key, f"'{path}' cannot be read ({reason(error)})"))
            continue
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path_parts = (*parts, entry.name)
            ending = os.path.splitext(entry.name)[1].lower()
            is_link = entry.is_symlink()
            if is_link and isdir(entry.path):
                links.append(path_parts)
            elif not is_link and entry.is_dir():
                folders.append(path_parts)
            elif is_link and dirname(realpath(entry.path)) in later:
                tree.others[OTHER_SPLIT] += 1
            # a broken link is a broken image
            elif ending in SUFFIXES and (is_link or entry.is_file()):
                tree.images.append(path_parts)
            else:
                tree.others[ending or "without ending"] += 1
        if not parts:
            tree.folders = sorted(name for (name,) in folders + links)
    if errors:
        raise UserError(*sorted(errors, key=str))
    if tree.others and tree.images:
        log.warning(f"{key}: '{top}': skipped {tree.skipped}. Convert images among them to PNG")
    tree.images.sort()
    return tree


def _class_faults(tree: _Tree) -> list[Fault]:
    expected = f"{tree.path}/CLASS/*"
    if not tree.images:
        return [tree.no_images(expected)]
    faults = []
    if loose := tree.loose_images:
        faults.append(
            Fault(
                "data.root",
                f"'{tree.path}' has {counted(len(loose), 'image')} outside of class folders "
                f"({listed(loose)}), expected {expected}",
            )
        )
    filled = {parts[0] for parts in tree.images}
    if empty := [name for name in tree.folders if name not in filled]:
        note = ""
        if links := [name for name in empty if islink(join(tree.path, name))]:
            note = f" ({listed(links)}: a link to images that are read already)"
        fault = f"'{tree.path}' has classes without images: {listed(empty)}{note}"
        faults.append(Fault("data.root", fault, "Fill or remove them"))
    return faults


def _missing_classes(train: _Tree, held: _Tree) -> list[Fault]:
    if missing := sorted({*train.classes} - {*held.classes}):
        fault = f"'{held.path}' lacks classes of '{train.path}': {listed(missing)}"
        return [Fault("data.root", fault)]
    return []


def _extra_classes(train: _Tree, held: _Tree) -> list[Fault]:
    if extra := sorted({*held.classes} - {*train.classes}):
        fault = f"'{held.path}' has classes that '{train.path}' lacks: {listed(extra)}"
        return [Fault("data.root", fault)]
    return []


def _split(root: str, tree: _Tree, classes: list[str] | None = None) -> Split:
    """Return the images of a tree, without labels if there are no classes."""
    below = os.path.relpath(tree.path, root)  # train, or '.'
    names = [posixpath.normpath(posixpath.join(below, *parts)) for parts in tree.images]
    if classes is None:
        return split_of(root, names)
    numbers = {name: number for number, name in enumerate(classes)}
    labels = [numbers[class_of(parts[0])] for parts in tree.images]
    return split_of(root, names, labels, classes)


# ---------------------------------------------------------------------- files that a command names
def images_at(paths: Sequence[str], key: str = "paths") -> list[str]:
    """Return named files, whatever their suffix, and the images in named folders, each once.

    Images of a folder are sorted, at any depth.

    Args:
        paths: Files and folders, in order.
        key: Of the config. Messages begin with it.

    Raises:
        UserError: A line for each path that does not exist, and each folder without images or that
            cannot be read.
    """

    def files_of(path: str) -> list[str]:
        if isdir(path):
            return [join(path, *parts) for parts in _not_empty(_walk(path, key)).images]
        if not os.path.lexists(path):
            raise UserError.of(
                key, f"'{path}' does not exist, expected images, or folders of images"
            )
        return [path]

    images: dict[str, str] = {}
    expanded = map(os.path.expanduser, paths)
    for files in checked(*(functools.partial(files_of, path) for path in expanded)):
        for file in files:
            images.setdefault(same_place(file), file)
    return list(images.values())


def same_place(path: str) -> str:
    """Return one name for all ways to write a file's path. Links to the file keep their own."""
    return join(realpath(dirname(path)), os.path.basename(path))
