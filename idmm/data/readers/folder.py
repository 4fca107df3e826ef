"""A user's folder of images: ROOT/train/CLASS/* and ROOT/val/CLASS/* (or test); without labels, any tree."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from idmm.data.formats import SUFFIXES
from idmm.data.split import LabelsMissing, Listing, Split, arranged, counted
from idmm.data.user_lists import composed
from idmm.errors import UserError, listed, reason

log = logging.getLogger(__name__)

PARTS = ("train", "val", "test")
UNLABELLED = "unlabelled"  # the folder beside train, of more images for pretraining


@dataclass
class _Tree:
    """What lies under a folder: images as tuples of path parts, how many other files, and the folders at its top."""

    path: str
    key: str = "data.root"  # of the config, that names it; messages begin with it
    images: list[tuple[str, ...]] = field(default_factory=list)
    others: int = 0
    folders: list[str] = field(default_factory=list)

    @property
    def classes(self) -> list[str]:
        """Names of the folders, composed: macOS may write the same name in another form."""
        return sorted({composed(name) for name in self.folders})

    @property
    def no_images(self) -> str:
        others = f", but {counted(self.others, 'file')} of other kinds" if self.others else ""
        return f"{self.key}: '{self.path}' has no images{others}"


def read_labelled(root: str) -> Listing:
    """Reads ROOT/train/CLASS/**, and val and test likewise where they exist; without these folders, ROOT/CLASS/**.

    Raises:
        LabelsMissing: No train folder, or one of a single class or none, and nothing else.
        UserError: Images outside of class folders, empty or differing classes, or one class only.
    """
    trees = _trees(root) or _class_folders(root)
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


def images_at(paths: Sequence[str], key: str = "paths") -> list[FoundImage]:
    """Returns named files, whatever their suffix, and the images in named folders, at any depth and sorted, each once.

    Args:
        paths: Of files and folders, in the order that is wanted.
        key: Of the config, that names them; messages begin with it.

    Raises:
        UserError: A line for each path where nothing is, and each folder that has no image or cannot be read.
    """
    found, faults = {}, []
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
            found.setdefault(same_place(image), FoundImage(image, folders))
    if faults:
        raise UserError(*faults)
    return list(found.values())


def same_place(path: str) -> str:
    """Returns one name for all ways to write a file's path; links to the file keep their own."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _class_folders(root: str) -> dict[str, _Tree]:
    """ROOT itself as what to train on, where its folders can be classes; LabelsMissing or UserError where not."""
    tree = _walk(root)
    nested = all(len(parts) > 1 for parts in tree.images) and len({parts[0] for parts in tree.images}) > 1
    if nested and not {name.lower() for name in tree.folders} & set(PARTS):
        what = f"its {len(tree.classes)} folders are taken for classes ({listed(tree.classes)})"
        log.info("data.root: '%s' has no 'train' folder: %s", root, what)
        return {"train": tree}
    wanted = f"{root}/train/CLASS/*, or the classes in a CSV file (--data.labels)"
    raise LabelsMissing(f"data.root: '{root}' has no 'train' folder; wanted {wanted}")


def read_any(root: str) -> Listing:
    """Reads the images of ROOT/train where that exists, else all under ROOT; with labels if the tree has classes.

    val and test come along only where their classes are those of a labelled train folder. UserError: no image at all.
    """
    trees = _trees(root) or {"train": _walk(root)}
    train = _not_empty(trees["train"])
    filled = {parts[0] for parts in train.images}
    if len(filled) < 2 or filled != set(train.folders) or any(len(parts) != 2 for parts in train.images):
        return Listing(_split(root, train, []), None, None)
    agree = {name: tree for name, tree in trees.items() if not _class_faults(tree) + _disagreements(train, tree)}
    return arranged({name: _split(root, tree, train.classes) for name, tree in agree.items()})


def _trees(root: str) -> dict[str, _Tree]:
    """The folders of splits that there are; nothing without ``train``."""
    paths = {name: os.path.join(root, name) for name in PARTS}
    if not os.path.isdir(paths["train"]):
        return {}
    return {name: _walk(path) for name, path in paths.items() if os.path.isdir(path)}


def _not_empty(tree: _Tree) -> _Tree:
    if not tree.images:
        raise UserError(f"{tree.no_images}; wanted at least one")
    return tree


def _walk(top: str, key: str = "data.root") -> _Tree:
    """Lists a tree in a fixed order, without hidden files; follows links, and reads each folder once."""
    tree, errors, seen = _Tree(top, key), [], set()
    for path, folders, names in os.walk(top, onerror=errors.append, followlinks=True):
        real = os.path.realpath(path)
        folders[:] = [] if real in seen else sorted(name for name in folders if not name.startswith("."))
        if real in seen:
            continue
        seen.add(real)
        tree.folders = tree.folders if path != top else list(folders)
        parts = () if path == top else tuple(os.path.relpath(path, top).split(os.sep))
        visible = [name for name in names if not name.startswith(".")]
        images = [name for name in visible if os.path.splitext(name)[1].lower() in SUFFIXES]
        tree.images += [(*parts, name) for name in images]
        tree.others += len(visible) - len(images)
    if errors:
        raise UserError(*sorted(f"{key}: '{error.filename}' cannot be read ({reason(error)})" for error in errors))
    if tree.others and tree.images:
        log.warning(f"{key}: '%s': passed over %s of other kinds", top, counted(tree.others, "file"))
    tree.images.sort()
    return tree


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
