"""A user's folder of images: ROOT/train/CLASS/* and ROOT/val/CLASS/* (or test). Without labels, any
tree."""

import functools
import logging
import os
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from os.path import dirname, isdir, join, realpath
from pathlib import Path

from idmm import config
from idmm.data.formats import SUFFIXES
from idmm.data.split import LabelsMissing, Listing, Split, arranged, class_of, split_of
from idmm.errors import UserError, checked, reason
from idmm.files import expand_home
from idmm.text import counted, listed

log = logging.getLogger(__name__)

PARTS = ("train", "val", "test")
UNLABELLED = "unlabelled"  # the folder of more images for pretraining, next to train


class FilesMissing(UserError):
    """Files of a dataset are missing or damaged: a download may help."""


def root_folder(data: config.Data) -> Path:
    """Return ``data.root``. FilesMissing if it is not given, missing, or no folder."""
    is_folder = data.name == "folder"
    if not data.root:
        if is_folder:
            expected = "a folder of images"
        else:
            expected = f"its folder ('idmm data info {data.name}' shows it)"
        raise FilesMissing(f"data.root: missing, data.name '{data.name}' expects {expected}")
    root = expand_home(data.root)
    if not isdir(root):
        if os.path.exists(root):
            fault = "is not a folder"
        else:
            fault = "does not exist"
        if is_folder:
            expected = "a folder of images"
        else:
            expected = f"the folder that holds {data.name}"
        raise FilesMissing(f"data.root: '{data.root}' {fault}, expected {expected}")
    return root


@dataclass
class _Tree:
    """The images under a folder as tuples of path parts, what was skipped, and the folders at its
    top."""

    path: str
    key: str = "data.root"  # of the config. Messages begin with it
    images: list[tuple[str, ...]] = field(default_factory=list)
    # endings of other files, and links to what is read without them
    others: Counter = field(default_factory=Counter)
    folders: list[str] = field(default_factory=list)
    places: set[str] = field(default_factory=set)  # real paths of all folders that were read

    @property
    def classes(self) -> list[str]:
        """Names of the folders at its top."""
        return sorted({class_of(name) for name in self.folders})

    @property
    def has_parts(self) -> bool:
        """Whether folders at its top are parts of a dataset, so that they cannot be classes."""
        return any(name.lower() in (*PARTS, UNLABELLED) for name in self.folders)

    @property
    def skipped(self) -> str:
        """Number and kinds of the other files."""
        kinds = listed(f"{count} {kind}" for kind, count in self.others.most_common())
        return f"{counted(self.others.total(), 'file')} of other kinds ({kinds})"

    def no_images(self, expected: str) -> str:
        """Return the fault of a tree without images."""
        others = f", but {self.skipped}" if self.others else ""
        return f"{self.key}: '{self.path}' has no images{others}, expected {expected}"


# ---------------------------------------------------------------------- datasets
def read_labelled(root: str, parts: Sequence[str] = PARTS) -> Listing:
    """Read ROOT/train/CLASS/**, and the other ``parts`` likewise if they exist. Without ``train``,
    ROOT/CLASS/**.

    Raises:
        LabelsMissing: No train folder, or one with a single class or none, and nothing else is
            wrong.
        UserError: Images outside of class folders, empty or differing classes, or one class only.
    """
    trees = _trees(root, parts)
    if not trees:  # ROOT itself if its folders can be classes
        tree = _walk(root)
        nested = (
            all(len(names) > 1 for names in tree.images)
            and len({names[0] for names in tree.images}) > 1
        )
        if not nested or tree.has_parts:
            expected = f"{root}/train/CLASS/*, or the classes in a CSV file (--data.labels)"
            if UNLABELLED in tree.folders:
                expected = f"the class folders in {root}/train, next to '{UNLABELLED}'"
            raise LabelsMissing(f"data.root: '{root}' has no 'train' folder, expected {expected}")
        what = f"its {len(tree.classes)} folders are taken for classes ({listed(tree.classes)})"
        log.info("data.root: '%s' has no 'train' folder: %s", root, what)
        trees = {"train": tree}
    train = trees["train"]
    faults = [fault for tree in trees.values() for fault in _class_faults(tree)]
    for tree in trees.values():
        if tree.images and train.images:  # else that is the fault
            faults += _disagreements(train, tree)
    if len(train.classes) == 1:
        faults.append(
            f"data.root: '{train.path}' has one class only ('{train.classes[0]}'), expected two or more"
        )
    if faults:
        enough_to_pretrain = (
            len(trees) == len(faults) == 1 and train.images and len(train.classes) < 2
        )
        raise (LabelsMissing if enough_to_pretrain else UserError)(*faults)
    return arranged({name: _split(root, tree, train.classes) for name, tree in trees.items()})


def read_any(root: str) -> Listing:
    """Read the images of ROOT/train if it exists, else all under ROOT, with labels if the tree has
    classes.

    val and test come along only if their classes are those of a labelled train folder. UserError:
    no image at all.
    """
    trees = _trees(root, PARTS) or {"train": _walk(root)}
    train = _not_empty(trees["train"])
    filled = {parts[0] for parts in train.images}
    flat = filled == set(train.folders) and all(len(parts) == 2 for parts in train.images)
    if not flat or len(train.classes) < 2 or (train.path == root and train.has_parts):
        return Listing(_split(root, train))
    agree = {
        name: tree
        for name, tree in trees.items()
        if not _class_faults(tree) + _disagreements(train, tree)
    }
    return arranged({name: _split(root, tree, train.classes) for name, tree in agree.items()})


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
    others = {
        entry.name
        for entry in os.scandir(root)
        if entry.is_dir() and not entry.name.startswith(".")
    }
    if others := sorted(others - {*PARTS, UNLABELLED}):
        log.warning(
            "data.root: '%s': these folders next to train are not read: %s", root, listed(others)
        )
    return _walk_parts(root, parts)


def _walk_parts(root: str, parts: Sequence[str]) -> dict[str, _Tree]:
    """List those of the folders ROOT/PART that there are. Links from one to images of a later one
    are skipped."""
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
    # still to read: paths, and their parts under top
    folders = [(top, ())]
    links = []
    while folders or links:
        path, parts = folders.pop() if folders else links.pop()
        real = realpath(path)
        if real in later:
            tree.others["links to other splits"] += 1
        if (
            real in tree.places
            or real in later
            or (parts and os.path.commonpath([real, home]) == real)
        ):
            continue
        tree.places.add(real)
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError as error:
            errors.append(f"{key}: '{path}' cannot be read ({reason(error)})")
            continue
        for entry in entries:
            place = (*parts, entry.name)
            ending = os.path.splitext(entry.name)[1].lower()
            is_link = entry.is_symlink()
            if entry.name.startswith("."):
                continue
            if isdir(entry.path) if is_link else entry.is_dir():
                (links if is_link else folders).append((entry.path, place))
                tree.folders += place if not parts else ()
            elif is_link and dirname(realpath(entry.path)) in later:
                tree.others["links to other splits"] += 1
            # a broken link is a broken image
            elif ending in SUFFIXES and (is_link or entry.is_file()):
                tree.images.append(place)
            else:
                tree.others[ending or "without ending"] += 1
    if errors:
        raise UserError(*sorted(errors))
    if tree.others and tree.images:
        log.warning(f"{key}: '%s': skipped %s. Convert images among them to PNG", top, tree.skipped)
    tree.folders.sort()
    tree.images.sort()
    return tree


def _class_faults(tree: _Tree) -> list[str]:
    if not tree.images:
        return [tree.no_images(f"{tree.path}/CLASS/*")]
    filled = {parts[0] for parts in tree.images if len(parts) > 1}
    faults = []
    if loose := [parts[0] for parts in tree.images if len(parts) == 1]:
        faults.append(
            f"data.root: '{tree.path}' has {counted(len(loose), 'image')} outside of class folders "
            f"({listed(loose)}), expected {tree.path}/CLASS/*"
        )
    if empty := [name for name in tree.folders if name not in filled]:
        links = [name for name in empty if Path(tree.path, name).is_symlink()]
        if links:
            why = f" ({listed(links)}: a link to images that are read already)"
        else:
            why = ""
        faults.append(
            f"data.root: '{tree.path}' has classes without images: {listed(empty)}{why}. Fill or remove them"
        )
    return faults


def _disagreements(train: _Tree, held: _Tree) -> list[str]:
    faults = []
    if missing := sorted({*train.classes} - {*held.classes}):
        faults.append(
            f"data.root: '{held.path}' lacks classes of '{train.path}': {listed(missing)}"
        )
    if extra := sorted({*held.classes} - {*train.classes}):
        faults.append(
            f"data.root: '{held.path}' has classes that '{train.path}' lacks: {listed(extra)}"
        )
    return faults


def _split(root: str, tree: _Tree, classes: list[str] | None = None) -> Split:
    """Return the images of a tree, without labels if there are no classes."""
    below = [part for part in os.path.relpath(tree.path, root).split(os.sep) if part != os.curdir]
    names = ["/".join((*below, *parts)) for parts in tree.images]
    numbers = {name: i for i, name in enumerate(classes or ())}
    if classes:
        labels = [numbers[class_of(parts[0])] for parts in tree.images]
    else:
        labels = None
    return split_of(root, names, labels, classes)


# ---------------------------------------------------------------------- files that a command names
def images_at(paths: Sequence[str], key: str = "paths") -> list[str]:
    """Return named files, whatever their suffix, and the images in named folders, at any depth and
    sorted, each once.

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
            raise UserError(
                f"{key}: '{path}' does not exist, expected images, or folders of images"
            )
        return [path]

    images: dict[str, str] = {}
    for files in checked(
        *(functools.partial(files_of, os.path.expanduser(path)) for path in paths)
    ):
        for file in files:
            images.setdefault(same_place(file), file)
    return list(images.values())


def same_place(path: str) -> str:
    """Return one name for all ways to write a file's path. Links to the file keep their own."""
    return join(realpath(dirname(path)), os.path.basename(path))
