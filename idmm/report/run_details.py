"""The sections of a report that are about one run: what it saw, its features, mistakes and calibration, its images."""

from collections.abc import Iterator

from idmm.confusion import confusion_figure
from idmm.pictures import shortened
from idmm.report import run_pictures as draw
from idmm.report.calibration import BINS
from idmm.report.facts import RunFacts, readable
from idmm.report.parts import Picture, Raster, Section, Sheets, TableOf, Text, Thumbs
from idmm.report.svg import thumbnail, webp

WORST = 10  # classes that are listed


def details(run: RunFacts, alone: bool) -> Iterator[Section]:
    """Yields what is shown of a run alone; where there are several, under its name."""
    level = 2 if alone else 3
    if not alone:
        head = Section(f"run-{run.number}", run.label, 2, [Text(f"{run.told()}: {run.path}", "quiet")])
        if (others := run.group) != run.label:
            head.parts.append(Text(f"Shown for all of {others}, which are the same but for the seed.", "quiet"))
        yield head
    for name, (title, make) in SECTIONS.items():
        there = getattr(run, name) is not None
        parts = list(make(run, "" if alone else f"-{run.number}")) if there else []
        if name in run.missing:
            parts.append(Text(run.missing[name], "quiet"))
        if parts:
            yield Section(f"{name}-{run.number}", title, level, parts)


def _crops(run: RunFacts, mark: str) -> Iterator:
    caption = "As drawn by the run's own seed; a row for each image."
    yield Sheets(f"crops{mark}.png", run.crops, f"{caption} {_shown(run)}".strip(), run.shown)


def _shown(run: RunFacts) -> str:
    return f"Shown: {run.shown}." if run.shown else ""


def _cloud(run: RunFacts, mark: str) -> Iterator:
    cloud = run.cloud
    said = "; ".join(f"{title} {share:.1f} %" for title, share in cloud.nearest.items())
    classes = len(set(cloud.labels.tolist()))
    alt = f"{len(cloud.labels)} test images of {classes} classes in a plane"
    if said:
        yield Text(f"Test images whose nearest other one, by cosine, is of their class: {said}.")
        alt += f"; nearest of the same class: {said}"
    some = f"the first {classes} of {len(cloud.classes)}" if classes < len(cloud.classes) else f"{classes}"
    caption = f"t-SNE of the pooled features of {len(cloud.labels):,} test images of {some} classes. Groups that "
    caption += "lie apart are told apart; how far apart, and how large a group is, says nothing."
    caption += " A class's name stands at the median of its images."
    stacked = draw.cloud_figure(cloud, stacked=True)
    yield Picture(f"features{mark}.png", draw.cloud_figure(cloud), alt, caption, stacked)


def _confusions(run: RunFacts, mark: str) -> Iterator:
    found = run.predicted
    (images, hits), instead = found.per_class(), found.confusions()
    alt = f"Confusion matrix of {len(run.classes)} classes; the table below has the worst"
    caption = "A row for each true class, with its test images, a column for each predicted one; blue is right, orange "
    caption += "wrong, and the shade is the share of the row's images."
    yield Picture(f"confusion{mark}.png", confusion_figure(found, run.classes), alt, caption)
    order = sorted((c for c in range(len(images)) if images[c]), key=lambda c: (hits[c] / images[c], -images[c]))
    rows = []
    for c in order[:WORST]:
        most, often = instead.get(c, (None, 0))
        taken = f"{run.classes[most]} ({often})" if often else ""
        rows.append([run.classes[c], str(images[c]), str(hits[c]), f"{100 * hits[c] / images[c]:.1f}", taken])
    heads = ["class", "test images", "right", "accuracy (%)", "most often taken for"]
    yield TableOf(heads, rows, "The worst classes" if len(order) > WORST else "All classes, the worst first")


def _mistakes(run: RunFacts, mark: str) -> Iterator:
    if not run.mistakes:
        yield Text("There is none: every test image was named right.")
        return
    items = []
    for one in run.mistakes:
        source = "" if one.image is None else webp(thumbnail(one.image))
        name = readable(one.path)
        said = f"taken for {one.predicted}, {100 * one.probability:.0f} % sure"
        items.append((source, [said, f"is {one.truth}", shortened(name, 22)], name))
    yield Text(
        f"What the classifier was surest of and wrong; a look at them often finds wrong labels. {_shown(run)}", "quiet"
    )
    yield Thumbs(items)


def _calibrated(run: RunFacts, mark: str) -> Iterator:
    made = run.calibration
    points = 100 * (made.confidence - made.accuracy)
    tone = "too sure" if points > 0 else "not sure enough"
    said = f"On average it is {100 * made.confidence:.1f} % sure and {100 * made.accuracy:.1f} % right: "
    said += f"{abs(points):.1f} points {tone}. "
    yield Text(f"{said}Expected calibration error: {100 * made.error:.1f} points.")
    caption = f"{BINS} bins of equal width; bars are 95 % intervals of the accuracy. The error is the mean distance "
    caption += "from the dotted line, weighted by images; with few images it is above zero by chance, too."
    yield Picture(f"calibration{mark}.png", draw.reliability_figure(made), f"Reliability diagram. {said}", caption)


def _explored(run: RunFacts, mark: str) -> Iterator:
    found = run.explored
    yield from (Text(line) for line in (*found.get("lines", ()), *found.get("notes", ())))
    for section in found.get("sections", ()):
        yield Text(f"{section['title']}: {section['count']:,}", "head")
        yield from (Text(line, "quiet") for line in section.get("lines", ()))
        if table := section.get("table"):
            rows = [["" if cell is None else str(cell) for cell in row] for row in table["rows"]]
            yield TableOf(table["columns"], rows)
        for image in section.get("pictures", ()):
            yield Raster(webp(image), f"{section['title']}: thumbnails of the images in the table", image.shape[1])
        if section.get("csv"):
            yield Text(f"All of them: {section['csv']}", "quiet")


def _drawn(run: RunFacts, mark: str) -> Iterator:
    image = run.drawn
    yield Raster(webp(image), f"Test images of {run.label}: the truth beside the prediction", image.shape[1])


SECTIONS = {  # of what a run has by that name: title, and what makes its parts; run.missing says why there is none
    "crops": ("What the network saw", _crops),
    "cloud": ("Features before and after", _cloud),
    "predicted": ("What is taken for what", _confusions),
    "mistakes": ("Most confident mistakes", _mistakes),
    "calibration": ("Is it right as often as it says?", _calibrated),
    "drawn": ("Test images", _drawn),
    "explored": ("Which training images are alike", _explored),
}
