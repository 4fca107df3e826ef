"""``idmm data``: getting a dataset, and what is wrong with one."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from idmm import config
from idmm.config.commands import DataCheckConfig, DataDownloadConfig
from idmm.data.doctor import CROP, SKEWED, Checkup, ImageRef, Pair, check
from idmm.data.download import fetch
from idmm.data.exclusions import exclusions, write_exclusions
from idmm.data.formats import as_bands
from idmm.data.images import composite, read_image
from idmm.data.listing import list_images
from idmm.data.registry import resolve_name, spec_of
from idmm.data.split import Listing, Split, counted
from idmm.data.user_lists import quoted
from idmm.errors import UserError, by_reason
from idmm.files import made_folder, write_json
from idmm.progress import log

_NAMED = 5  # images or pairs of a kind that the text names; check.json has all
_DRAWN = 12  # pairs on the sheet
HELD_OUT = 0.2  # share of the training images that the baseline is tested on if there are no others
BATCH = 64  # images whose hand-made features are taken at a time


def download(given: DataDownloadConfig) -> str:
    """Fetches a dataset unless it is there already, and checks its sizes; errors as of `fetch` and `list_images`."""
    fetch(spec_of(given.name), given.root)
    splits = list_images(config.Data(name=given.name, root=given.root), labelled=True)
    counts = ", ".join(f"{len(split):,} {name}" for name, split in splits.parts.items())
    return f"{given.name}: {counts}, all as the protocol has it"


def checkup(given: DataCheckConfig) -> int:
    """Looks at every image of a dataset, prints what was found, and writes check.json, check.png and exclude.txt to
    ``given.out``; returns the exit code, 1 where something should be mended. UserError where the dataset cannot be
    opened at all, or ``given.out`` cannot be written."""
    same = ("name", "root", "max_pixels", "exclude", "labels")
    data, notes = resolve_name(config.Data(**{name: getattr(given, name) for name in same}))
    for note in notes:
        log.info("%s", note)
    out = made_folder(given.out)
    from idmm.evaluation import baseline

    found, splits = check(data, lambda labels: baseline.drawn(labels, baseline.MOST), progress=True)
    found.floor = _floor(found, splits, data)
    print("\n".join(report(found)))
    if out is not None:
        write_json(out / "check.json", found.plain())
        (out / "check.png").unlink(missing_ok=True)  # of an earlier check
        if found.pairs:
            _draw(found, splits, given.max_pixels, out / "check.png")
        asked = " ".join(filter(None, ["idmm data check", given.name, given.root and f"--root {given.root}"]))
        odd = {"transparent": found.transparent, "of one colour": found.one_colour}
        lines = exclusions(found.pairs, found.unreadable, odd)
        print(f"written to {out}: {write_exclusions(asked, given.exclude, lines, out / 'exclude.txt')}")
    return int(not found.clean)


def _floor(found: Checkup, splits: Listing, data: config.Data) -> dict | None:
    """What the baseline reaches, and what naming the largest class would, on the split that results would be reported
    on; if there is none, on a fifth of the training images. None if there are no labels for that."""
    from idmm.evaluation import baseline

    if splits.train.labels is None:
        return None
    there = (name for name in ("test", "val") if (split := splits.parts.get(name)) and split.labels is not None)
    of = next(there, "train")
    train, held = splits.train, splits.parts[of]
    if of == "train":
        try:
            parted = list_images(replace(data, val_fraction=HELD_OUT), labelled=True)
        except UserError:  # of one class, or what the layout's faults say
            return None
        train, held = parted.train, parted.test
    crops, labels = _crops(found, train, "train")
    queries, truth = _crops(found, held, of)
    if len(np.unique(labels)) < 2 or not len(truth):
        return None
    began, some = time.monotonic(), baseline.drawn_to_fit(labels, baseline.MOST)
    reached = baseline.measured(_features(crops[some]), labels[some], _features(queries), truth, began)
    largest = 100 * float(np.unique(truth, return_counts=True)[1].max() / len(truth))
    return {"baseline_top1": reached.top1, "largest_class": largest, "train_images": reached.train,
            "images": reached.test, "of": of}  # fmt: skip


def _crops(found: Checkup, split: Split, part: str) -> tuple[np.ndarray, np.ndarray]:
    """The kept crops of a split, [N, S, S, C], and the numbers of their classes."""
    names, seen = sorted(found.classes[part]), found.seen[part]
    used = [i for i, name in enumerate(split.names) if name in seen and split.labels[i] >= 0]
    crops = np.array([seen[split.names[i]] for i in used])
    return crops, np.array([names.index(split.classes[split.labels[i]]) for i in used], dtype=np.int64)


def _features(crops: np.ndarray) -> np.ndarray:
    """Returns the baseline's features of crops, uint8 or uint16 [N, S, S, C] -> [N, d]."""
    import torch

    from idmm.data.values import unit
    from idmm.evaluation import baseline

    parts = torch.arange(len(crops)).split(BATCH)
    batches = (
        {"images": unit(torch.from_numpy(crops[part.numpy()]).permute(0, 3, 1, 2)), "index": part} for part in parts
    )
    channels = crops.shape[3]
    return baseline.features(batches, [0.0] * channels, [1.0] * channels, alone=True)


def report(found: Checkup) -> list[str]:
    """Returns the findings as lines of text, each kind with what it means for training."""
    counts = ", ".join(f"{n:,} {name}" for name, n in found.images.items())
    lines = [f"{found.dataset}{f' in {found.root}' if found.root else ''}: {counts} images"]
    if found.bands:
        lines.append(f"channels: {counted(found.bands.count, 'channel')}: {as_bands(found.bands.count)}")
    if found.layout:
        how = "fine-tuning needs more" if found.suffices else "fine-tuning would refuse them"
        lines += [f"layout: pretraining can use these images, {how}:", *(f"  {line}" for line in found.layout)]
    lines += _balance(found)
    if bad := found.unreadable:
        lines.append(f"unreadable: {counted(len(bad), 'file')}; training stops on them without --data.on_error skip:")
        lines += _some(by_reason(*([image[key] for image in bad] for key in ("name", "reason"))))
    for what, images in (
        ("transparent: {} with an opacity of 0 everywhere; training sees the colours:", found.transparent),
        ("one colour: {} of equal pixels:", found.one_colour),
    ):
        if images:
            lines += [what.format(counted(len(images), "image")), *_some([quoted(image["name"]) for image in images])]
    lines += _pairs(found.pairs)
    if floor := found.floor:
        of = "held-out training" if floor["of"] == "train" else floor["of"]
        text = "the baseline to beat: logistic regression on hand-made features {baseline_top1:.1f} %"
        text += " (largest class {largest_class:.1f} %), fitted to {train_images:,} training images"
        lines.append(f"{text.format(**floor)}, on {floor['images']:,} {of} images at {CROP.size} px")
    suspected = sum(not pair.certain for pair in found.pairs)
    if not found.clean:
        return [*lines, "some of this should be mended, see above"]
    if suspected:
        return [*lines, f"nothing certain was found, but {counted(suspected, 'suspected pair')} should be looked at"]
    return [*lines, "nothing that should be mended"]


def _some(examples: list[str]) -> list[str]:
    more = len(examples) - _NAMED
    rest = [f"  and {more} more (check.json of --out DIR lists all)"] if more > 0 else []
    return [f"  {example}" for example in examples[:_NAMED]] + rest


def _balance(found: Checkup) -> Iterator[str]:
    for split, classes in found.classes.items():
        ordered = sorted(classes.items(), key=lambda item: item[1])
        (small, least), (large, most) = ordered[0], ordered[-1]
        middle = int(np.median(list(classes.values())))
        span = f"{least} ('{small}') to {most} ('{large}') images, median {middle}"
        skewed = "; fine-tuning will favour the large ones" if most > SKEWED * max(1, least) else ""
        yield f"classes of {split}: {len(classes)}, with {span if least < most else f'{most} images each'}{skewed}"
    for split, (least, middle, most) in found.sides.items():
        yield f"sizes of {split}: short sides of {least} to {most} px, median {middle}"


def _pairs(pairs: list[Pair]) -> Iterator[str]:
    """What is wrong with pairs of images, and which they are."""
    for what, text, some in (
        ("duplicates", "of the same image; keep one of each", [p for p in pairs if p.exact and not p.leaks]),
        ("near-duplicates", "within a split; harmless when few", [p for p in pairs if not (p.exact or p.leaks)]),
        ("leakage", "of the same image in two splits; accuracies come out too high",
         [p for p in pairs if p.leaks and p.certain]),
        ("suspected leakage", "across splits; look at the sheet of --out DIR",
         [p for p in pairs if p.leaks and not p.certain]),
    ):  # fmt: skip
        if some:
            yield f"{what}: {counted(len(some), 'pair')} {text}:"
            yield from _some([f"{_place(p.first)} and {_place(p.second)} ({_kind(p)})" for p in some])


def _kind(pair: Pair) -> str:
    kind = pair.kind if pair.exact else f"{pair.kind}, {pair.similarity:.3f}"
    return kind + ", labels differ" * pair.disagrees


def _place(image: ImageRef) -> str:
    return quoted(image.name if image.name.startswith(image.split) else f"{image.split} {image.name}")


def _draw(found: Checkup, splits: Listing, max_pixels: int, path: Path) -> None:
    """Draws of each group of images that are alike the worst pair: labels that disagree, then leaks, then the rest,
    exact ones first."""
    from idmm.figures.sheets import LARGE, Tile, caption_sheet, in_rows, one_of_each

    order = sorted(found.pairs, key=lambda p: (not p.disagrees, not p.leaks, not p.exact, -p.similarity))
    groups = one_of_each([(pair.first, pair.second) for pair in order])
    drawn = []
    for pair in (order[number] for number in list(groups)[:_DRAWN]):
        for image, what in ((pair.first, pair.kind + ", leaks" * pair.leaks), (pair.second, _kind(pair))):
            item = getattr(splits, image.split).items[image.index]
            pixels = read_image(item, max_pixels, found.range, found.bands).pixels
            drawn.append(Tile(composite(pixels), f"{what}\n{_place(image)}\n{image.label or ''}"))
    title = f"{found.dataset}: {counted(len(order), 'pair')} of images that look the same, one of each group"
    caption_sheet(in_rows(drawn), path, title, cell=LARGE)
