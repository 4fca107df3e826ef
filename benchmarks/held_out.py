"""``idmm train`` on five sets, with and without public weights, against what takes seconds.

    apt-get download tuxpaint-stamps-default oxygen-icon-theme ufoai-textures \\
        asterisk-core-sounds-{en,es,fr,it,ru}-wav
    python benchmarks/held_out.py --fonts               # prints packages of fonts: download them
    python benchmarks/held_out.py --packages . --sets sets
    python benchmarks/held_out.py --sets sets --out runs/held_out    # makes the remaining runs
    python benchmarks/held_out.py --table                            # writes docs/train.md

drawings: Tux Paint's stamps, 96 px, which are also in small_sets.py. voices: spectrograms of the
same sentences in five languages. letters: 24 capitals of 56 packages of fonts. icons: Oxygen's by
context. textures: those of the game UFO: Alien Invasion by folder. Variants of an image, a sentence
or a font are in train or in test. The clock of a run counts the seconds of one core.

With weights, logistic regression on frozen features is the floor: the last ones at 224 px, four
depths at 112 and 224 px, and three depths at 224 px with hand-made ones.
"""

import collections
import dataclasses
import io
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from side_by_side import (
    commit,
    fill_page,
    head,
    mean_and_spread,
    read_runs,
    row,
    runs_parser,
    write_runs,
)
from small_sets import STAMPS, stamps, write

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/train.md"
MARK = "<!-- held out -->"
SETS = {
    "drawings": "drawings (12 classes, 465 images)",
    "voices": "voices (5 classes, 1,122 spectrograms)",
    "letters": "letters (24 classes, 1,008 images)",
    "icons": "icons (7 classes, 594 images)",
    "textures": "textures of a game (8 classes, 1,024 images)",
}
VIEWS = {"voices": ["--flip", "0", "--jitter", "0"], "letters": ["--flip", "0"]}
FEW = ["--data.labelled", "{per_class: 5, seed: SEED}"]
IMAGENET = ["--init", "imagenet"]
WAYS = {
    "five": [*FEW, "--minutes", "1"],
    "all": ["--minutes", "1"],
    "five, imagenet": [*FEW, *IMAGENET, "--minutes", "2"],
    "all, imagenet": [*IMAGENET, "--minutes", "2"],
}
TITLES = {
    "five": "five labels per class, one minute",
    "all": "all labels, one minute",
    "five, imagenet": "five labels per class, `--init imagenet`, two minutes",
    "all, imagenet": "all labels, `--init imagenet`, two minutes",
}
# parts of the features of hog_conv with the network of imagenet, by their numbers: hand-made ones,
# two Fisher vectors, four depths at 112 px and four at 224 px
WIDTHS = (1892, 1536, 768, 40, 112, 320, 1280, 40, 112, 320, 1280)
FLOORS = {
    "last features": (10,),
    "four depths, two sizes": (3, 4, 5, 6, 7, 8, 9, 10),
    "three depths, hand-made": (0, 8, 9, 10),
}
STRENGTH = 100.0  # of the regression on features of length 1
FONTS = """
adf-accanthis adf-berenis adf-gillius adf-ikarius adf-irianis adf-libris adf-mekanus adf-oldania
adf-romande adf-switzera adf-tribun adf-universalis adf-verana averia-sans-gwf averia-serif-gwf
beteckna blankenburg breip cantarell comfortaa courier-prime crosextra-carlito dejavu-core
dejavu-extra dustin ebgaramond f500 femkeklaver firacode freefont-ttf gfs-didot gotico-antiqua
goudybookletter hack inconsolata isabella junicode jura lato liberation linuxlibertine mononoki
ocr-a oldstandard open-sans opendin play quattrocento radisnoir roboto-unhinted rufscript sjfonts
texgyre tomsontalks vollkorn yanone-kaffeesatz
""".split()


# ---------------------------------------------------------------------- the sets
def split(groups: dict[str, list], load, least: int, most: int | None, variant):
    """Yield part, class and image, a fourth of the names of each group to test on. Small groups are
    left out."""
    draw = np.random.default_rng(0)
    for name, items in sorted(groups.items()):
        variants = collections.defaultdict(list)
        for item in items:
            variants[variant(item)].append(item)
        keys = [sorted(variants)[k] for k in draw.permutation(len(variants))]
        if len(keys) < least:
            continue
        keys = keys[:most]
        for number, key in enumerate(keys):
            for item in variants[key]:
                image = load(item)
                if image is not None and min(image.size) >= 8:
                    yield "test" if number < len(keys) / 4 else "train", name, image


def icons(root: Path):
    """Yield the icons of 64 px, and of 48 px if there is no larger one."""
    groups = collections.defaultdict(list)
    seen = set()
    for size in ("64x64", "48x48"):
        for path in sorted((root / "usr/share/icons/oxygen/base" / size).rglob("*.png")):
            context = path.parent.name
            if (context, path.stem) not in seen and not path.is_symlink():
                seen.add((context, path.stem))
                groups[context].append(path)

    def load(path: Path) -> Image.Image:
        image = Image.open(path).convert("RGBA")
        image.thumbnail((64, 64), Image.Resampling.LANCZOS)
        flat = Image.new("RGB", image.size, "white")
        flat.paste(image, mask=image.getchannel("A"))
        return flat

    return split(groups, load, least=30, most=240, variant=lambda path: path.stem)


def letters(root: Path):
    """Yield a capital of a font of each package, 48 px."""
    packages = collections.defaultdict(list)
    draw = np.random.default_rng(0)
    for package in sorted(f"fonts-{name}" for name in FONTS):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in (".ttf", ".otf"):
                packages[package].append(path)
    groups = {}
    for letter in "ABCDEFGHJKLMNPQRSTUVWXYZ":
        groups[letter] = [
            (name, letter, ps[draw.integers(len(ps))]) for name, ps in sorted(packages.items())
        ]

    def load(item: tuple[str, str, Path]) -> Image.Image | None:
        try:
            font = ImageFont.truetype(str(item[2]), 40)
        except OSError:  # a font of bitmaps
            return None
        image = Image.new("L", (48, 48), 255)
        pen = ImageDraw.Draw(image)
        left, top, right, bottom = pen.textbbox((0, 0), item[1], font=font)
        pen.text((24 - (left + right) / 2, 24 - (top + bottom) / 2), item[1], font=font, fill=0)
        return image if right - left >= 3 else None

    return split(groups, load, least=12, most=None, variant=lambda item: item[0])


def textures(root: Path):
    """Yield textures without those of other maps, 160 px at most."""
    groups = collections.defaultdict(list)
    for path in sorted(root.rglob("*.pk3")):
        archive = zipfile.ZipFile(path)
        for name in sorted(archive.namelist()):
            stem = name.rsplit(".", 1)[0]
            picture = name.startswith("textures/") and name.endswith((".jpg", ".png", ".tga"))
            if picture and not stem.endswith(("_nm", "_gm", "_sm", "_rm")):
                groups[name.split("/")[1]].append((archive, name))

    def load(item: tuple[zipfile.ZipFile, str]) -> Image.Image:
        image = Image.open(io.BytesIO(item[0].read(item[1]))).convert("RGB")
        image.thumbnail((160, 160))
        return image

    def variant(item: tuple[zipfile.ZipFile, str]) -> str:
        return re.sub(r"[_-]?\d*[a-z]?$", "", item[1].rsplit(".", 1)[0])

    return split(groups, load, least=24, most=120, variant=variant)


def voices(root: Path):
    """Yield spectrograms of 1.5 seconds, 64 px, of 300 sentences that all five languages have."""
    from scipy.io import wavfile
    from scipy.signal import stft

    sentences = collections.defaultdict(dict)
    for package in root.glob("asterisk-core-sounds-*-wav"):
        for path in package.rglob("*.wav"):
            sentence = str(path).split("/sounds/")[1].split("/", 1)[1]
            sentences[sentence][package.name.split("-")[3]] = path
    names = sorted(name for name, languages in sentences.items() if len(languages) == 5)
    order = np.random.default_rng(0).permutation(len(names))[:300]
    for number, name in enumerate(names[k] for k in order):
        for language, path in sorted(sentences[name].items()):
            rate, sound = wavfile.read(path)
            if len(sound) < 2000:
                continue
            length = int(1.5 * rate)
            sound = np.pad(sound[:length].astype(np.float32), (0, max(0, length - len(sound))))
            spectrum = stft(sound, rate, nperseg=256, noverlap=256 - length // 64, boundary=None)[
                2
            ][:128]
            bands = np.log10(np.abs(spectrum) ** 2 + 1e-3)
            grey = np.uint8(255 * np.clip((bands - bands.max()) / 7 + 1, 0, 1)[::-1])
            part = "test" if number < 75 else "train"
            yield part, language, Image.fromarray(grey).resize((64, 64), Image.Resampling.BOX)


def build(packages: Path, sets: Path) -> None:
    """Write the sets from Debian packages."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for package in sorted(packages.glob("*.deb")):
            subprocess.run(
                ["dpkg-deb", "-x", package, root / package.name.split("_")[0]], check=True
            )
        write(stamps(root / "tuxpaint-stamps-default" / STAMPS), sets / "drawings")
        write(icons(root / "oxygen-icon-theme"), sets / "icons")
        write(letters(root), sets / "letters")
        write(textures(root / "ufoai-textures"), sets / "textures")
        write(voices(root), sets / "voices")


# ---------------------------------------------------------------------- the runs
def make(name: str, way: str, seed: int, sets: Path, out: Path) -> dict:
    """Run ``idmm train`` to its end and return the figures. SystemExit: it was stopped or
    failed."""
    from idmm.cli import main as command

    folder = out / f"{name} {way} {seed}".replace(",", "").replace(" ", "-")
    argv = ["train", str(sets / name), "--seed", str(seed), "--out", str(folder)]
    flags = [flag.replace("SEED", str(seed)) for flag in WAYS[way]]
    if code := command([*argv, *VIEWS.get(name, []), *flags]):
        sys.exit(code)
    state = json.loads((folder / "train.json").read_text())
    figures = {key: round(state["result"][key], 2) for key in ("top1", "baseline_top1", "seconds")}
    made = {"set": name, "way": way, "seed": seed, "kept": state["best"], **figures}
    if "imagenet" in way:
        made["floors"] = floors(folder, sets / name, out / f"{name}.npz")
    return {**made, "commit": commit()}


def floors(run: Path, root: Path, cache: Path) -> dict[str, float]:
    """Return the accuracy of logistic regression on parts of the features (percent).

    It is fitted to the training images that the run learned from.
    """
    from sklearn.linear_model import LogisticRegression

    import idmm
    from idmm import config
    from idmm.data.listing import list_images

    images = sorted((root / "train").rglob("*.png")), sorted((root / "test").rglob("*.png"))
    if not cache.exists():
        features = [idmm.embed(str(run / "features"), list(map(str, part))) for part in images]
        np.savez(cache, train=features[0], test=features[1])
    saved = np.load(cache)
    data = config.Data(**json.loads((run / "train.json").read_text())["data"])
    used = dataclasses.replace(data, subset=data.labelled or data.subset, labelled=None)
    names = set(list_images(used, labelled=True).train.names)
    numbers = [i for i, path in enumerate(images[0]) if str(path.relative_to(root)) in names]
    starts = np.cumsum([0, *WIDTHS])
    accuracies = {}
    for label, groups in FLOORS.items():
        parts = []
        for group in groups:
            columns = slice(starts[group], starts[group + 1])
            rows = np.concatenate([saved["train"][:, columns], saved["test"][:, columns]])
            parts.append(rows / np.maximum(1e-9, np.linalg.norm(rows, axis=1, keepdims=True)))
        joined = np.concatenate(parts, axis=1) / len(parts) ** 0.5
        train = joined[: len(images[0])][numbers]
        truth = [path.parent.name for path in images[1]]
        fit = LogisticRegression(C=STRENGTH, max_iter=1000)
        fit.fit(train, [images[0][i].parent.name for i in numbers])
        accuracies[label] = round(100 * fit.score(joined[len(images[0]) :], truth), 2)
    return accuracies


def of_way(runs: list[dict], name: str, way: str, figure: str) -> list[float]:
    """Return a figure of each seed."""
    return [run[figure] for run in runs if (run["set"], run["way"]) == (name, way)]


def floors_of(runs: list[dict], name: str, way: str) -> dict[str, list[float]]:
    """Return what takes seconds: the baseline, or the regressions on frozen features."""
    if "imagenet" not in way:
        return {"baseline": of_way(runs, name, way, "baseline_top1")}
    measured = of_way(runs, name, way, "floors")
    return {label: [floor[label] for floor in measured] for label in FLOORS}


def gains(runs: list[dict], way: str) -> dict[str, float]:
    """Return the mean points over the best floor, for each set."""
    points = {}
    for name in SETS:
        if ours := of_way(runs, name, way, "top1"):
            best = max(map(statistics.mean, floors_of(runs, name, way).values()))
            points[name] = statistics.mean(ours) - best
    return points


def table(runs: list[dict]) -> str:
    """Return floors and ``idmm train``, means over draws with their spread, as Markdown."""
    lines = []
    for way, title in TITLES.items():
        points = gains(runs, way)
        if not points:
            continue
        names = FLOORS if "imagenet" in way else ["baseline"]
        lines += [head(title, *names, "`idmm train`", "points over the best of them")]
        for name, gain in points.items():
            values = [*floors_of(runs, name, way).values(), of_way(runs, name, way, "top1")]
            lines.append(row(SETS[name], *map(mean_and_spread, values), f"{gain:+.1f}"))
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Write the sets, make the remaining runs, or write the table."""
    parser = runs_parser(__doc__, "held_out.json")
    parser.add_argument("--fonts", action="store_true", help="print the packages of fonts")
    parser.add_argument("--packages", type=Path, help="folder of .deb files, to write the sets")
    args = parser.parse_args()
    if args.fonts:
        print(" ".join(f"fonts-{name}" for name in FONTS))
        return
    if args.packages:
        build(args.packages, args.sets)
        return
    runs = read_runs(args.results)
    if args.table:
        fill_page(PAGE, MARK, table(runs))
        return
    time.monotonic = time.process_time
    for seed, name, way in itertools.product(range(3), SETS, WAYS):
        if not any((run["set"], run["way"], run["seed"]) == (name, way, seed) for run in runs):
            runs.append(make(name, way, seed, args.sets.resolve(), args.out.resolve()))
            write_runs(args.results, runs)


if __name__ == "__main__":
    main()
