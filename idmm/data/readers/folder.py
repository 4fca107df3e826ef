"""A user's folder of images: ROOT/train/CLASS/* and ROOT/val/CLASS/* (or test); without labels, any tree."""

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from idmm.data.formats import SUFFIXES
from idmm.data.split import LabelsMissing, Split, Splits, arranged, counted
from idmm.data.user_lists import composed
from idmm.errors import UserError, listed, reason

log = logging.getLogger(__name__)

PARTS = ("train", "val", "test")
UNLABELLED = "unlabelled"  # the folder beside train, of more images for pretraining
# Folders of training images in layouts of boxes and masks, and the folder beside that tells them
_DENSE = (
    ("images/train", "masks/train"),
    ("images/train", "annotations"),
    ("images/training", "annotations/training"),
    ("train2017", "annotations"),
    ("train2014", "annotations"),
    ("images", "masks"),
)
_CLUTTER = {"thumbs.db", "ehthumbs.db", "desktop.ini"}


@dataclass
class _Tree:
    """What lies under a folder: images as tuples of path parts, other files by suffix, and the folders at its top."""

    path: str
    key: str = "data.root"  # of the config, that names it; messages begin with it
    images: list[tuple[str, ...]] = field(default_factory=list)
    others: Counter = field(default_factory=Counter)
    folders: list[str] = field(default_factory=list)

    @property
    def classes(self) -> list[str]:
        """Names of the folders, composed: macOS may write the same name in another form."""
        return sorted({composed(name) for name in self.folders})

    @property
    def other_files(self) -> str:
        kinds = sorted(self.others.items(), key=lambda kind: (-kind[1], kind[0]))
        what = listed(f"{n} {suffix}" for suffix, n in kinds)
        return f"{counted(self.others.total(), 'file')} of other kinds ({what})"

    @property
    def no_images(self) -> str:
        return f"{self.key}: '{self.path}' has no images{f', but {self.other_files}' if self.others else ''}"


def read_labelled(root: str) -> Splits:
    """Reads ROOT/train/CLASS/**, and val and test likewise where they exist; without these folders, ROOT/CLASS/**.

    Raises:
        LabelsMissing: No train folder, or one of a single class or none, and nothing else.
        UserError: Images outside of class folders, empty or differing classes, or one class only.
    """
    trees = _trees(root) if os.path.isdir(os.path.join(root, "train")) else _class_folders(root)
    train = trees["train"]
    faults = [fault for tree in trees.values() for fault in _class_faults(tree)]
    for tree in trees.values():
        if tree.images and train.images:  # else that is the fault
            faults += _disagreements(train, tree)
    if len(train.classes) == 1:
        faults.append(f"data.root: '{train.path}' has one class only ('{train.classes[0]}'); wanted two or more")
    if faults:
        suffices = len(trees) == len(faults) == 1 and train.images and len(train.classes) < 2
        raise (LabelsMissing if suffices else UserError)(*faults)
    return arranged({name: _split(root, tree, train.classes) for name, tree in trees.items()})


def read_unlabelled(root: str) -> Split | None:
    """Reads the images of ROOT/unlabelled/**, where that stands beside ROOT/train and has any."""
    top = os.path.join(root, UNLABELLED)
    if not (os.path.isdir(top) and os.path.isdir(os.path.join(root, "train"))):
        return None
    tree = _walk(top)
    return _split(root, tree, []) if tree.images else None


def images_under(root: str) -> list[str]:
    """Returns the names of all images under ROOT, '/' between; UserError where there is none."""
    return ["/".join(parts) for parts in _not_empty(_walk(root)).images]


@dataclass(frozen=True)
class FoundImage:
    """A file that somebody named, or that lies in a folder that they named."""

    path: str
    folders: tuple[str, ...]
    """Names of the folders that may say what it shows: those below the named folder, outermost first, then that
    itself; of a file that was named the folder that it lies in."""


def images_at(paths: Sequence[str], key: str = "paths") -> tuple[list[FoundImage], int]:
    """Returns named files, whatever their suffix, and the images in named folders, at any depth and sorted.

    Args:
        paths: Of files and folders, in the order that is wanted.
        key: Of the config, that names them; messages begin with it.

    Returns:
        The images, each once, and how many were reached more than once.

    Raises:
        UserError: A line for each path where nothing is, and each folder that has no image or cannot be read.
    """
    found, again, faults = {}, 0, []
    for path in map(os.path.expanduser, paths):
        own = composed(os.path.basename(os.path.abspath(path)))
        images = []
        if os.path.isdir(path):
            try:
                names = _not_empty(_walk(path, key)).images
            except UserError as error:
                faults += error.faults
                continue
            images = [(os.path.join(path, *parts), (*map(composed, parts[:-1]), own)) for parts in names]
        elif os.path.lexists(path):
            images = [(path, (composed(os.path.basename(os.path.dirname(os.path.abspath(path)))),))]
        else:
            faults.append(f"{key}: '{path}' does not exist; wanted images, or folders of images")
        for image, folders in images:
            again += same_place(image) in found
            found.setdefault(same_place(image), FoundImage(image, folders))
    if faults:
        raise UserError(*faults)
    return list(found.values()), again


def same_place(path: str) -> str:
    """Returns one name for all ways to write a file's path; links to the file keep their own."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _class_folders(root: str) -> dict[str, _Tree]:
    """ROOT itself as what to train on, where its folders can be classes; LabelsMissing or UserError where not."""
    tree = _walk(root)
    nested = all(len(parts) > 1 for parts in tree.images) and len({parts[0] for parts in tree.images}) > 1
    sets = {parts[0] for parts in tree.images if len(parts) > 3 and parts[1] == "train"}
    if nested and sets == {parts[0] for parts in tree.images}:
        found = f"the folders in '{root}' are datasets of their own ({listed(sorted(sets))})"
        raise UserError(f"data.root: {found}; wanted one of them")
    if nested and not {name.lower() for name in tree.folders} & set(PARTS):
        what = f"its {len(tree.classes)} folders are taken for classes ({listed(tree.classes)})"
        log.info("data.root: '%s' has no 'train' folder: %s", root, what)
        return {"train": tree}
    wanted = f"{root}/train/CLASS/*, or the classes in a CSV file (--data.labels)"
    raise LabelsMissing(f"data.root: '{root}' has no 'train' folder; wanted {wanted}")


def read_any(root: str) -> Splits:
    """Reads the images of ROOT/train where that exists, else those to train on in a layout of boxes or masks, else all
    under ROOT; with labels if the tree has classes.

    val and test come along only where their classes are those of a labelled train folder. UserError: no image at all.
    """
    trees = _trees(root, needed=("train",))
    if "train" not in trees:
        dense = [folder for folder, beside in _DENSE if all(_has(root, name) for name in (folder, beside))]
        trees = {"train": _walk(os.path.join(root, *dense[:1]))}
        if dense:
            log.info("data.root: '%s' has boxes or masks: the images of '%s' are taken", root, dense[0])
    train = _not_empty(trees["train"])
    filled = {parts[0] for parts in train.images}
    if len(filled) < 2 or filled != set(train.folders) or any(len(parts) != 2 for parts in train.images):
        return Splits(_split(root, train, []), None, None)
    agree = {name: tree for name, tree in trees.items() if not _class_faults(tree) + _disagreements(train, tree)}
    return arranged({name: _split(root, tree, train.classes) for name, tree in agree.items()})


def read_all(root: str) -> Splits:
    """Reads ROOT/train, val and test as far as they can be, each with the classes it has itself, and ROOT/unlabelled;
    without ROOT/train as read_any.

    Images outside of class folders have the label -1 where others have one. UserError: no image to train on.
    """
    trees = _trees(root, needed=("train",))
    if "train" not in trees:
        return read_any(root)
    _not_empty(trees["train"])
    splits = arranged({name: _split(root, tree, tree.classes) for name, tree in trees.items() if tree.images})
    return replace(splits, unlabelled=read_unlabelled(root))


def _trees(root: str, needed: tuple[str, ...] = PARTS) -> dict[str, _Tree]:
    """The folders of splits that there are; of those that are not needed, the ones that can be read."""
    trees = {}
    for name in PARTS:
        if os.path.isdir(path := os.path.join(root, name)) and (trees or name == "train"):
            with contextlib.nullcontext() if name in needed else contextlib.suppress(UserError):
                trees[name] = _walk(path)
    return trees


def _has(root: str, folder: str) -> bool:
    return os.path.isdir(os.path.join(root, folder))


def _not_empty(tree: _Tree) -> _Tree:
    if not tree.images:
        raise UserError(f"{tree.no_images}; wanted at least one")
    return tree


def _walk(top: str, key: str = "data.root") -> _Tree:
    """Lists a tree in a fixed order; follows links, but not into a folder that it is already inside of."""
    tree, faults = _Tree(top, key), []
    todo = [((), frozenset())]  # (parts of the folder's path, the real folders it lies in)
    while todo:
        parts, outer = todo.pop()
        path = os.path.join(top, *parts)
        real = os.path.realpath(path)
        if real in outer:
            continue
        try:
            children = list(os.scandir(path))
        except OSError as error:
            faults.append(f"{key}: '{path}' cannot be read ({reason(error)})")
            continue
        for child in children:
            inner = (*parts, child.name)
            if child.name.startswith(".") or child.name.lower() in _CLUTTER:
                continue
            if _is_dir(child):
                todo.append((inner, outer | {real}))
                tree.folders += [child.name] if not parts else []
            elif os.path.splitext(child.name)[1].lower() not in SUFFIXES:
                tree.others[os.path.splitext(child.name)[1].lower() or "no suffix"] += 1
            elif child.is_symlink() or child.is_file():  # a dangling link is a bad image, a pipe is none
                tree.images.append(inner)
    if faults:
        raise UserError(*sorted(faults))
    if tree.others and tree.images:
        log.warning(f"{key}: '%s': passed over %s", top, tree.other_files)
    tree.images.sort()
    tree.folders.sort()
    return tree


def _is_dir(child: os.DirEntry) -> bool:
    try:
        return child.is_dir()
    except OSError:  # a link to itself
        return False


def _class_faults(tree: _Tree) -> list[str]:
    if not tree.images:
        return [f"{tree.no_images}; wanted {tree.path}/CLASS/*"]
    filled, faults = {parts[0] for parts in tree.images if len(parts) > 1}, []
    if loose := [parts[0] for parts in tree.images if len(parts) == 1]:
        what = f"{counted(len(loose), 'image')} outside of class folders ({listed(loose)})"
        faults.append(f"data.root: '{tree.path}' has {what}; wanted {tree.path}/CLASS/*")
    if empty := [name for name in tree.folders if name not in filled]:
        faults.append(f"data.root: '{tree.path}' has classes without images: {listed(empty)}; fill or remove them")
    return faults


def _disagreements(train: _Tree, held: _Tree) -> list[str]:
    ours, theirs, faults = set(train.classes), set(held.classes), []
    if missing := sorted(ours - theirs):
        faults.append(f"data.root: '{held.path}' lacks classes of '{train.path}': {listed(missing)}")
    if extra := sorted(theirs - ours):
        faults.append(f"data.root: '{held.path}' has classes that '{train.path}' lacks: {listed(extra)}")
    return faults


def _split(root: str, tree: _Tree, classes: list[str]) -> Split:
    """The images of a tree; without labels where there are no classes."""
    index = {name: i for i, name in enumerate(classes)}
    items = [os.path.join(tree.path, *parts) for parts in tree.images]
    below = [part for part in os.path.relpath(tree.path, root).split(os.sep) if part != os.curdir]
    names = ["/".join((*below, *parts)) for parts in tree.images]
    if not classes:
        return Split(items, names, None, None)
    labels = [index[composed(parts[0])] if len(parts) > 1 else -1 for parts in tree.images]
    return Split(items, names, np.array(labels, dtype=np.int64), classes)
