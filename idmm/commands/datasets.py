"""``idmm data``: getting a dataset, what is wrong with one, what is kept of them."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from idmm import config
from idmm.config import parsing
from idmm.config.commands import DataCheckConfig, DataDownloadConfig
from idmm.data.composite import composite, explained
from idmm.data.datasets import open_splits
from idmm.data.doctor import SKEWED, Checkup, ImageRef, Pair, check
from idmm.data.download import fetch
from idmm.data.exclusions import exclusions
from idmm.data.images import read_image
from idmm.data.registry import DATASETS, resolve_name, spec_of
from idmm.data.split import Split, Splits, counted
from idmm.data.user_lists import is_named
from idmm.errors import UserError, by_reason, listed
from idmm.files import home, made_folder, write_bytes, write_json
from idmm.progress import log

_NAMED = 5  # images or pairs of a kind that the text names; check.json has all
_DRAWN = 12  # pairs on the sheet
HELD_OUT = 0.2  # share of the training images that raw pixels are tried on, where there are no others
_NO_SHEET = " that --out DIR draws"


def download(given: DataDownloadConfig) -> str:
    """Fetches a dataset unless it is there already, and checks its sizes; errors as of `fetch` and `open_splits`."""
    name, spec = given.name, spec_of(given.name)
    data = config.Data(name=name, root=None if spec.embedded else given.root)
    try:
        return f"{name} is there already: {_counts(open_splits(data, labelled=True))}"
    except UserError:
        fetch(spec, given.root)
    return f"{name}: {_counts(open_splits(data, labelled=True))}, all as the protocol has it"


def _counts(splits: Splits) -> str:
    return ", ".join(f"{len(split):,} {name}" for name, split in splits.parts.items())


def checkup(given: DataCheckConfig) -> int:
    """Looks at every image of a dataset, prints what was found, and writes check.json, check.png and exclude.txt to
    ``given.out``; returns the exit code, 1 where something should be mended. UserError where the dataset cannot be
    opened at all, or ``given.out`` cannot be written."""
    named = given.root is not None or given.name in DATASETS
    if not named and (Path(given.name).is_dir() or len(Path(given.name).parts) > 1):
        given = replace(given, name=None, root=given.name)
    same = ("name", "root", "max_pixels", "exclude", "labels", "groups", "in_chans")
    asked = parsing.build(config.Data, {name: getattr(given, name) for name in (*same, "bands")})
    data, notes = resolve_name(asked)
    for note in notes:
        log.info("%s", note)
    out = made_folder(given.out)
    found, splits = check(data, given.tiny, progress=True, size=given.size)
    found.floor = _floor(found, splits, data, given.size)
    print("\n".join(report(found, written=out is not None)))
    if out is not None:
        write_json(out / "check.json", found.plain())
        print(f"written: {out / 'check.json'}", end="")
        if found.pairs:
            _draw(found, splits, given.max_pixels, out / "check.png")
            print(f", {out / 'check.png'}", end="")
        else:
            (out / "check.png").unlink(missing_ok=True)  # of an earlier check
        asked = " ".join(filter(None, ["idmm data check", given.name, given.root and f"--root {given.root}"]))
        print(f", {write_exclusions(asked, given.exclude, exclusions(found), out / 'exclude.txt')}")
    return int(not found.clean)


def _floor(found: Checkup, splits: Splits, data: config.Data, size: int) -> dict | None:
    """What raw pixels reach, as ``pixel_knn`` of a run at that size says, and what naming the largest class would, on
    the split that results would be reported on; where there is none, on a fifth of the training images. None where
    there are no labels for that.

    Of many images only so many are compared that it takes seconds.
    """
    from idmm.stages.results import PAIRS, rows_knn

    if splits.train.labels is None:
        return None
    there = (name for name in ("test", "val") if (split := splits.parts.get(name)) and split.labels is not None)
    of = next(there, "train")
    train, held = splits.train, splits.parts[of]
    if of == "train":
        try:
            parted = open_splits(replace(data, val_fraction=HELD_OUT, allow_size_mismatch=True), labelled=True)
        except UserError:  # of one class, or what the layout's faults say
            return None
        train, held = parted.train, parted.test
    rows, labels = _rows(found, train, "train", 0)
    queries, truth = _rows(found, held, of, 1)
    if len(np.unique(labels)) < 2 or not len(truth):
        return None
    few = np.unique(np.linspace(0, len(truth) - 1, max(1, min(len(truth), 4 * PAIRS // len(labels)))).astype(int))
    reached = rows_knn(rows, labels, queries[few], truth[few])
    largest = 100 * float(np.unique(truth[few], return_counts=True)[1].max() / len(few))
    return {"pixel_knn": reached, "largest_class": largest, "images": len(few), "of": of, "size": size}


def _rows(found: Checkup, split: Split, part: str, form: int) -> tuple[np.ndarray, np.ndarray]:
    """The small images of a split that could be read and have a class, in one of its two forms, float32 [N, 3072],
    and their classes' names."""
    seen = found.seen[part]
    used = [i for i, name in enumerate(split.names) if name in seen and split.labels[i] >= 0]
    rows = np.array([seen[split.names[i]][form].ravel() for i in used], dtype=np.float32)
    return rows, np.array([split.classes[split.labels[i]] for i in used])


def write_exclusions(command: str, before: str | None, lines: list[str], path: Path) -> str:
    """Writes a file for ``data.exclude``, after what was left out already, by the file ``before``; ``command``: what
    finds it. Returns what is to be said of it."""
    if before is not None:
        head = home(before).read_bytes().rstrip(b"\n")
    else:
        head = f"# for --data.exclude: what '{command}' would leave out".encode()
    content = b"\n".join([head, *(line.encode("utf-8", "surrogateescape") for line in lines), b""])
    kept = ""
    if path.exists() and path.read_bytes() != content:  # it may have been edited
        names = itertools.chain([".old.txt"], (f".old{number}.txt" for number in itertools.count(2)))
        old = next(place for place in map(path.with_suffix, names) if not place.exists())
        path.replace(old)
        kept = f" (the one before is {old.name})"
    write_bytes(path, content)
    if not any(is_named(line.decode(errors="replace")) for line in content.split(b"\n")):
        return f"{path}{kept}, which leaves out nothing as it is"
    return f"{path}{kept}; leave out what it names with --data.exclude {path}"


def report(found: Checkup, written: bool = False) -> list[str]:
    """Returns the findings as lines of text, each kind with what it means for training.

    ``written``: check.json and check.png are written, too.
    """
    counts = ", ".join(f"{n:,} {name}" for name, n in found.images.items())
    lines = [f"{found.dataset}{f' in {found.root}' if found.root else ''}: {counts} images"]
    lines += [*_channels(found), *_layout(found), *_balance(found), *(f"depth: {line}" for line in found.depth_lines)]
    for text, examples in (*_images(found), *_pairs(found, "look at the sheet" + ("" if written else _NO_SHEET))):
        lines += [text, *(f"  {example}" for example in examples[:_NAMED])]
        if len(examples) > _NAMED:
            lines.append(f"  and {len(examples) - _NAMED} more ({'check.json' if written else '--out DIR'} lists all)")
    if found.groups:
        lines.append(f"groups: {', '.join(f'{count} in {name}' for name, count in found.groups.items())}")
    if shared := found.shared_groups:
        text = f"groups: {counted(len(shared), 'group')} with images both in train and in val or test"
        lines += [f"{text}; accuracies come out too high:", f"  {listed(shared)}"]
    if found.near_skipped:
        lines.append("near-duplicates: not looked for among so many images")
    lines += _floor_line(found)
    suspected = sum(not pair.certain for pair in found.pairs)
    if not found.clean:
        return [*lines, "some of this should be mended, see above"]
    if suspected:
        return [*lines, f"nothing certain was found, but {counted(suspected, 'suspected pair')} should be looked at"]
    return [*lines, "nothing that should be mended"]


def _channels(found: Checkup) -> Iterator[str]:
    """What the channels of bands are."""
    if not found.channels:
        return
    yield f"channels: {found.channels}"
    shown = counted(min(3, found.bands.used), "channel")
    yield f"  near-duplicates are looked for by the first {shown}"


def _floor_line(found: Checkup) -> Iterator[str]:
    """What a network has to beat."""
    if found.floor:
        of = "held-out training" if found.floor["of"] == "train" else found.floor["of"]
        floor = "the floor to beat: kNN of raw pixels {pixel_knn:.1f} % (largest class {largest_class:.1f} %)"
        yield f"{floor.format(**found.floor)}, on {found.floor['images']:,} {of} images at {found.floor['size']} px"


def _layout(found: Checkup) -> Iterator[str]:
    for key, (got, wanted) in found.size_mismatch.items():
        what = "classes" if key == "classes" else f"{key} images"
        yield f"sizes: {got:,} {what}, the protocol has {wanted:,}: results cannot be compared with the literature's"
    for lines, text in (
        (found.layout_faults, "layout: pretraining can use these images, fine-tuning would refuse them:"),
        (found.remarks, "layout: fine as it is for pretraining; fine-tuning needs more:"),
    ):
        yield from [text, *(f"  {line}" for line in lines)] if lines else []


def _balance(found: Checkup) -> Iterator[str]:
    for split, classes in found.classes.items():
        ordered = sorted(classes.items(), key=lambda item: item[1])
        (small, least), (large, most) = ordered[0], ordered[-1]
        middle = int(np.median(list(classes.values())))
        span = f"{least} ('{small}') to {most} ('{large}') images, median {middle}"
        span = span if least < most else f"{most} images each"
        text = f"classes of {split}: {len(classes)}, with {span}"
        if most > SKEWED * max(1, least):
            text += "; fine-tuning will favour the large ones"
        yield text
        if unlabelled := found.images[split] - sum(classes.values()):
            yield f"{counted(unlabelled, 'image')} of {split} without a class: for pretraining alone"


def _images(found: Checkup) -> Iterator[tuple[str, list[str]]]:
    """What is wrong with single images, and which they are."""
    if bad := found.unreadable:
        text = f"unreadable: {counted(len(bad), 'file')}; training stops on them, or goes on without them"
        yield (
            f"{text}\n  (--data.on_error skip):",
            by_reason(*([image[key] for image in bad] for key in ("name", "reason"))),
        )
    if tiny := found.tiny:
        text = f"tiny: {counted(len(tiny), 'image')} with a side under {found.tiny_below} px"
        sizes = [f"{image['name']}: {image['width']} x {image['height']}" for image in tiny]
        yield f"{text}; small crops of them look alike:", sizes


def _pairs(found: Checkup, look: str) -> Iterator[tuple[str, list[str]]]:
    """What is wrong with pairs of images, and which they are; ``look``: what to do with those that may be right."""
    groups = found.sorted_pairs()
    exact, leaks, conflicts = groups["duplicates"], groups["leakage"], groups["conflicts"]
    nearly = "of nearly the same image in two"
    for what, unit, text, pairs in (
        ("repeated", "unlabelled image", "that train already has; pretraining refuses them",
         [pair for pair in exact if pair.first.split != pair.second.split]),
        ("duplicates", "image", "that a split already has; keep one of each",
         [pair for pair in exact if pair.first.split == pair.second.split]),
        ("near-duplicates", "pair", f"within a split; harmless when few, {look}", groups["near_duplicates"]),
        ("leakage", "pair", "of the same image in two splits; accuracies come out too high",
         [pair for pair in leaks if pair.certain]),
        ("suspected leakage", "image", "to evaluate on among the unlabelled ones, which pretraining would see",
         [pair for pair in leaks if pair.exact and not pair.certain]),
        ("suspected leakage", "pair", f"{nearly} splits; {look}", [pair for pair in leaks if not pair.exact]),
        ("conflicting labels", "pair", "of the same image in two classes; one of them is wrong",
         [pair for pair in conflicts if pair.exact]),
        ("suspected conflicting labels", "pair", f"{nearly} classes; {look}",
         [pair for pair in conflicts if not pair.exact]),
    ):  # fmt: skip
        if pairs:
            yield f"{what}: {counted(len(pairs), unit)} {text}:", _shown(pairs)


def _shown(pairs: list[Pair]) -> list[str]:
    return [
        f"{_place(p.first)} and {_place(p.second)} ({p.kind if p.exact else f'{p.kind}, {p.similarity:.3f}'})"
        for p in pairs
    ]


def _place(image: ImageRef) -> str:
    return image.name if image.name.startswith(image.split) else f"{image.split} {image.name}"


def _draw(found: Checkup, splits: Splits, max_pixels: int, path: Path) -> None:
    """Draws of each group of images that are alike the worst pair: labels that disagree, then leaks, then the rest,
    exact ones first."""
    from idmm.report.sheets import LARGE, Tile, caption_sheet, in_rows, one_of_each

    order = sorted(found.pairs, key=lambda p: (not p.disagrees, not p.leaks, not p.exact, -p.similarity))
    drawn, groups = [], one_of_each([(pair.first, pair.second) for pair in order])
    for number, many in list(groups.items())[:_DRAWN]:
        pair = order[number]
        said = pair.kind + ", leaks" * pair.leaks  # a longer line would be cut
        more = ["labels differ"] * pair.disagrees + [f"{many} in the group"] * (many > 2)
        for image, what in ((pair.first, said), (pair.second, ", ".join(more))):
            item = getattr(splits, image.split).items[image.index]
            caption = f"{what}\n{_place(image)}\n{image.label or ''}"
            pixels = read_image(item, max_pixels, found.range, found.bands).pixels
            drawn.append(Tile(composite(pixels), caption))
    some = f"{len(drawn) // 2} of " * (len(drawn) // 2 < len(groups))
    title = f"{found.dataset}: {some}{counted(len(groups), 'group')} of images that look the same, a pair of each"
    notes = [f"{counted(len(order), 'pair')} in all", explained(found.bands, found.range is not None)]
    note = "; ".join(filter(None, notes))
    caption_sheet(in_rows(drawn), path, title, note, cell=LARGE)
