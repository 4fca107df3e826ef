"""A user's folder of images: ROOT/train/CLASS/* and ROOT/val/CLASS/* (or test); without labels, any tree."""

import contextlib
import logging
import os
import unicodedata
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from idmm.data.images import SUFFIXES
from idmm.data.split import LabelsMissing, Split, Splits, arranged, counted
from idmm.errors import UserError, listed, reason

log = logging.getLogger(__name__)

_CLUTTER = {"thumbs.db", "ehthumbs.db", "desktop.ini"}


@dataclass
class _Tree:
    """What lies under a folder: images as tuples of path parts, other files by suffix, and the folders at its top."""

    path: str
    images: list[tuple[str, ...]] = field(default_factory=list)
    others: Counter = field(default_factory=Counter)
    folders: list[str] = field(default_factory=list)


def read_labelled(root: str) -> Splits:
    """Reads ROOT/train/CLASS/**, and val and test likewise where they exist.

    Raises:
        LabelsMissing: No train folder, or one of a single class or none, and nothing else.
        UserError: Images outside of class folders, empty or differing classes, or one class only.
    """
    if not os.path.isdir(os.path.join(root, "train")):
        other = _other_case(root)
        but, kind = (f", but '{other}'", UserError) if other else ("", LabelsMissing)
        raise kind(f"data.root: '{root}' has no 'train' folder{but}; wanted {root}/train/CLASS/*")
    names = [name for name in ("train", "val", "test") if os.path.isdir(os.path.join(root, name))]
    trees = {name: _walk(os.path.join(root, name)) for name in names}
    faults = [fault for tree in trees.values() for fault in _class_faults(tree)]
    for name in names[1:]:
        if trees[name].images and trees["train"].images:  # else that is the fault
            faults += _disagreements(trees["train"], trees[name])
    classes = sorted({_class_of(name) for name in trees["train"].folders})
    if len(classes) == 1:
        faults.append(f"data.root: '{trees['train'].path}' has one class only ('{classes[0]}'); wanted two or more")
    if faults:
        plain = len(trees) == len(faults) == 1 and trees["train"].images and len(classes) < 2
        raise (LabelsMissing if plain else UserError)(*faults)
    return arranged({name: _labelled_split(root, tree, classes) for name, tree in trees.items()})


def read_any(root: str) -> Splits:
    """Reads the images of ROOT/train where that exists, else all under ROOT; with labels if the tree has classes.

    val and test come along only where their classes are those of a labelled train folder.

    Raises:
        UserError: No image at all.
    """
    train_path = os.path.join(root, "train")
    has_train = os.path.isdir(train_path)
    tree = _walk(train_path if has_train else root)
    if not has_train and (other := _other_case(root)):
        log.warning("data.root: '%s' has no 'train' folder, but '%s': all images under the root are taken", root, other)
    if not tree.images:
        raise UserError(f"data.root: '{tree.path}' has no images{_but(tree)}; wanted at least one")
    if not _is_class_structured(tree):
        items = [os.path.join(tree.path, *parts) for parts in tree.images]
        return Splits(Split(items, [_name(root, item) for item in items], None, None), None, None)
    classes = sorted({_class_of(name) for name in tree.folders})
    splits = {"train": _labelled_split(root, tree, classes)}
    for name in ("val", "test"):
        path = os.path.join(root, name)
        if not has_train or not os.path.isdir(path):
            continue
        try:
            held = _walk(path)
        except UserError:  # pretraining can do without it
            continue
        if not _class_faults(held) and not _disagreements(tree, held):
            splits[name] = _labelled_split(root, held, classes)
    return arranged(splits)


def read_all(root: str) -> Splits:
    """Reads ROOT/train, val and test as far as they can be, each with the classes it has itself; else as read_any.

    Images outside of class folders have the label -1 where others have one.

    Raises:
        UserError: No image to train on.
    """
    if not os.path.isdir(os.path.join(root, "train")):
        return read_any(root)
    splits = {}
    for name in ("train", "val", "test"):
        if os.path.isdir(os.path.join(root, name)):
            with contextlib.nullcontext() if name == "train" else contextlib.suppress(UserError):
                tree = _walk(os.path.join(root, name))
                if tree.images:
                    splits[name] = _labelled_split(root, tree, sorted({_class_of(folder) for folder in tree.folders}))
                elif name == "train":
                    raise UserError(f"data.root: '{tree.path}' has no images{_but(tree)}; wanted at least one")
    return arranged(splits)


def _other_case(root: str) -> str | None:
    """The folder that is 'train' but for its capitals."""
    with contextlib.suppress(OSError):  # which is told when its images are listed
        return next((name for name in sorted(os.listdir(root)) if name != "train" and name.lower() == "train"), None)


def _walk(top: str) -> _Tree:
    """Lists a tree in a fixed order; follows links, but not into a folder that it is already inside of."""
    tree, faults = _Tree(top), []
    todo = [((), frozenset())]  # (parts of the folder's path, the real folders it lies in)
    while todo:
        parts, outer = todo.pop()
        path = os.path.join(top, *parts)
        real = os.path.realpath(path)
        if real in outer:
            continue
        try:
            entries = list(os.scandir(path))
        except OSError as error:
            faults.append(f"data.root: '{path}' cannot be read ({reason(error)})")
            continue
        for entry in entries:
            inner = (*parts, entry.name)
            if entry.name.startswith(".") or entry.name.lower() in _CLUTTER:
                continue
            if _is_dir(entry):
                todo.append((inner, outer | {real}))
                tree.folders += [entry.name] if not parts else []
            elif os.path.splitext(entry.name)[1].lower() not in SUFFIXES:
                tree.others[os.path.splitext(entry.name)[1].lower() or "no suffix"] += 1
            elif entry.is_symlink() or entry.is_file():  # a dangling link is a bad image, a pipe is none
                tree.images.append(inner)
    if faults:
        raise UserError(*sorted(faults))
    if tree.others and tree.images:
        log.warning("data.root: '%s': passed over%s", top, _other_files(tree))
    tree.images.sort()
    tree.folders.sort()
    return tree


def _is_dir(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _but(tree: _Tree) -> str:
    return f", but{_other_files(tree)}" if tree.others else ""


def _other_files(tree: _Tree) -> str:
    kinds = listed(f"{n} {suffix}" for suffix, n in sorted(tree.others.items(), key=lambda kind: (-kind[1], kind[0])))
    return f" {counted(sum(tree.others.values()), 'file')} of other kinds ({kinds})" if tree.others else ""


def _class_of(folder: str) -> str:
    return unicodedata.normalize("NFC", folder)  # macOS may write the same name in another form


def _class_faults(tree: _Tree) -> list[str]:
    loose = [parts[0] for parts in tree.images if len(parts) == 1]
    filled = {parts[0] for parts in tree.images if len(parts) > 1}
    faults = []
    if not tree.images:
        return [f"data.root: '{tree.path}' has no images{_but(tree)}; wanted {tree.path}/CLASS/*"]
    if loose:
        what = f"{counted(len(loose), 'image')} outside of class folders ({listed(loose)})"
        faults.append(f"data.root: '{tree.path}' has {what}; wanted {tree.path}/CLASS/*")
    if empty := [name for name in tree.folders if name not in filled]:
        faults.append(f"data.root: '{tree.path}' has classes without images: {listed(empty)}; fill or remove them")
    return faults


def _disagreements(train: _Tree, held: _Tree) -> list[str]:
    ours, theirs = ({_class_of(name) for name in tree.folders} for tree in (train, held))
    faults = []
    if missing := sorted(ours - theirs):
        faults.append(f"data.root: '{held.path}' lacks classes of '{train.path}': {listed(missing)}")
    if extra := sorted(theirs - ours):
        faults.append(f"data.root: '{held.path}' has classes that '{train.path}' lacks: {listed(extra)}")
    return faults


def _is_class_structured(tree: _Tree) -> bool:
    filled = {parts[0] for parts in tree.images}
    return all(len(parts) == 2 for parts in tree.images) and len(filled) >= 2 and filled == set(tree.folders)


def _labelled_split(root: str, tree: _Tree, classes: list[str]) -> Split:
    index = {name: i for i, name in enumerate(classes)}
    labels = [index[_class_of(parts[0])] if len(parts) > 1 else -1 for parts in tree.images]
    items = [os.path.join(tree.path, *parts) for parts in tree.images]
    names = [_name(root, item) for item in items]
    if not classes:
        return Split(items, names, None, None)
    return Split(items, names, np.array(labels, dtype=np.int64), classes)


def _name(root: str, item: str) -> str:
    return os.path.relpath(item, root).replace(os.sep, "/")
