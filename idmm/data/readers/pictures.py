"""Real images that packages ship, for demonstrations: tiles of photographs, and faces. They need no files."""

from collections.abc import Iterator

import numpy as np

from idmm import config
from idmm.data.split import Split, Splits
from idmm.errors import UserError, install

TILE = 32  # pixels
# scikit-image's pictures, and scikit-learn's two photographs
PICTURES = (
    *("astronaut", "brick", "camera", "chelsea", "coffee", "coins", "grass", "gravel", "hubble_deep_field"),
    *("immunohistochemistry", "moon", "retina", "rocket", "stereo_motorcycle"),
)
PHOTOGRAPHS = ("china", "flower")
TRAIN, TEST = 48, 16  # tiles of a picture


def read_photos(data: config.Data, labelled: bool) -> Splits:
    """Which of 16 pictures is a 32 px tile from? Train from the left three quarters of each, test from the rest."""
    tiles: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    names = []
    for name, picture in _pictures():
        names.append(name)
        edge = picture.shape[1] * 3 // 4 // TILE * TILE  # no tile is on both sides
        tiles["train"].append(_tiles(picture[:, :edge], TRAIN))
        tiles["test"].append(_tiles(picture[:, edge:], TEST))
    return Splits(_split("train", tiles["train"], names), None, _split("test", tiles["test"], names))


def read_faces(data: config.Data, labelled: bool) -> Splits:
    """Face or not? 200 patches of 25 px, the first 70 of each kind to train on (Labeled Faces in the Wild)."""
    patches = np.rint(_skimage().lfw_subset() * 255).astype(np.uint8)  # [200, 25, 25], faces first
    kinds = np.repeat(patches[..., None], 3, axis=3).reshape(2, 100, 25, 25, 3)
    names = ["face", "other"]
    return Splits(_split("train", list(kinds[:, :70]), names), None, _split("test", list(kinds[:, 70:]), names))


def _pictures() -> Iterator[tuple[str, np.ndarray]]:
    """Names and pixels, uint8 [H, W, 3]."""
    from sklearn.datasets import load_sample_image

    shipped = _skimage()
    for name in PICTURES:
        picture = getattr(shipped, name)()
        picture = picture[0] if isinstance(picture, tuple) else picture  # a stereo pair: its left half
        yield name, picture[..., :3] if picture.ndim == 3 else np.repeat(picture[..., None], 3, axis=2)
    for name in PHOTOGRAPHS:
        yield name, load_sample_image(f"{name}.jpg")


def _tiles(picture: np.ndarray, count: int) -> np.ndarray:
    """Evenly many tiles over a picture, uint8 [count, TILE, TILE, 3]."""
    rows, columns = picture.shape[0] // TILE, picture.shape[1] // TILE
    cut = picture[: rows * TILE, : columns * TILE].reshape(rows, TILE, columns, TILE, 3).swapaxes(1, 2)
    cut = cut.reshape(-1, TILE, TILE, 3)  # [rows * columns, ...]
    return cut[np.linspace(0, len(cut) - 1, count).round().astype(int)]


def _split(part: str, images: list[np.ndarray], names: list[str]) -> Split:
    return Split(
        items=np.concatenate(images),
        names=[f"{part}/{name}/{i:03d}" for name, of in zip(names, images, strict=True) for i in range(len(of))],
        labels=np.repeat(np.arange(len(names)), [len(of) for of in images]),
        classes=names,
    )


def _skimage():
    try:
        from skimage import data
    except ImportError:
        raise UserError(f"data.name: 'photos' and 'faces' need scikit-image: {install('demo')}") from None
    return data
