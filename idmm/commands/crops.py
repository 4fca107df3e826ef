"""What a stage sees of its images: originals, their crops, and what CutMix makes of them."""

import numpy as np
import torch

from idmm.config import Augment, Views
from idmm.data.augment import TrainTransform
from idmm.data.composite import composite, ends_of, picture
from idmm.data.views import MultiCropTransform
from idmm.mixing import Mix, draw_cutmix, mix_images
from idmm.report.sheets import Tile
from idmm.seeding import derive, numpy_rng

Block = tuple[str, list[list[np.ndarray]]]  # a title, and for each image its pictures

VISIBLE = 0.2  # least share of a crop that the sheet's CutMix replaces
EPOCHS = 5  # of fine-tuning whose images are shown, at most
SHOWN_DRAWS = 100  # draws among which one as large as that is looked for


def crop_blocks(
    store, views: Views, *, mean, std, cutmix_alpha: float = 0.0, images: int = 6, seed: int = 0
) -> list[tuple[str, list[Tile]]]:
    """Returns rows of a sheet, a column for each image: the original, then its crops of each group.

    The crops are those of the first epoch of a run of that seed, made by the loader's own code, with normalisation
    undone. With CutMix, every group follows a second time as mixed for the network, by the first draw whose box is
    large enough to see; in training many boxes are smaller.

    Args:
        store: Images by number, as :class:`idmm.data.views.MultiCropTransform` takes them.
        views: Crops and colours.
        mean: Of each channel.
        std: Likewise.
        cutmix_alpha: The method's; 0: no CutMix.
        images: Columns, spread evenly over the dataset.
        seed: Of the run.
    """
    indices = spread_out(len(store), images)
    batch = MultiCropTransform(store, views, mean, std, seed)(0, indices)
    shown = _Shown(store, indices, mean, std)
    blocks = [shown.originals]
    for number, (crops, group) in enumerate(zip(batch["views"], views.crops, strict=True)):
        low, high = group.scale
        side = "" if group.size is None else f", {group.size} px"
        blocks.append((f"crops of {low:.0%} to\n{high:.0%} of the area{side}", shown.crops(crops)))
        if cutmix_alpha:
            blocks.append(_mixed(crops, cutmix_alpha, derive(seed, "crop sheet", number), shown))
    return _rows(blocks)


def augmented_blocks(
    store, augment: Augment, size: int, epochs: int, *, mean, std, key: int, images: int = 6
) -> list[tuple[str, list[Tile]]]:
    """Returns rows of a sheet, a column for each image: the original, and what the first epochs see of it.

    With CutMix, the first epoch's follow as :func:`crop_blocks` shows crops.

    Args:
        store: Images by number, as :class:`idmm.data.augment.TrainTransform` takes them.
        augment: How they are changed.
        size: Side of the result (pixels).
        epochs: Of the run's stage.
        mean, std, images: As of :func:`crop_blocks`.
        key: Of the run's stage.
    """
    indices, epochs = spread_out(len(store), images), min(epochs, EPOCHS)
    transform = TrainTransform(store, augment, size, mean, std, key)
    made = torch.stack([transform(epoch, indices)["images"] for epoch in range(epochs)], 1)  # [B, epochs, C, S, S]
    shown = _Shown(store, indices, mean, std)
    blocks = [
        shown.originals,
        (f"as seen in\n{f'epochs 1 to {epochs}' if epochs > 1 else 'epoch 1'}", shown.crops(made)),
    ]
    if augment.cutmix_alpha:
        blocks.append(_mixed(made[:, :2], augment.cutmix_alpha, derive(key, "crop sheet"), shown))
    return _rows(blocks)


def _rows(blocks: list[Block]) -> list[tuple[str, list[Tile]]]:
    return [
        (title if k == 0 else "", [Tile(pictures[k], "") for pictures in images])
        for title, images in blocks for k in range(len(images[0]))
    ]  # fmt: skip


def spread_out(count: int, images: int) -> np.ndarray:
    """Returns so many image numbers, of ``count``, or all."""
    return np.unique(np.linspace(0, count - 1, min(images, count)).astype(int))


class _Shown:
    """How the views of some images of a store are shown: as the images themselves, which views may be darker than."""

    def __init__(self, store, indices: np.ndarray, mean, std):
        self.mean, self.std = mean, std
        self.originals: Block = "original", [[picture(store, i)] for i in indices]
        whole = [store.image(i).permute(1, 2, 0).numpy() for i in indices]
        self.ends = [ends_of(image) / np.iinfo(image.dtype).max for image in whole]  # as views have them

    def crops(self, views: torch.Tensor) -> list[list[np.ndarray]]:
        """Undoes normalisation, [B, count, C, S, S] -> B rows of pictures, uint8 [S, S, 3]."""
        shape = (-1, 1, 1)
        values = views * torch.tensor(self.std).reshape(shape) + torch.tensor(self.mean).reshape(shape)
        values = values.clamp(0, 1).permute(0, 1, 3, 4, 2).numpy()  # [B, count, S, S, C]
        return [[composite(crop, ends) for crop in row] for row, ends in zip(values, self.ends, strict=True)]


def _mixed(crops: torch.Tensor, alpha: float, key: int, shown: _Shown) -> Block:
    mix = _visible_mix(crops, alpha, key)
    mixed = mix_images(crops.flatten(0, 1), mix).unflatten(0, crops.shape[:2])
    return f"after CutMix\n({mix.lam:.0%} its own pixels)", shown.crops(mixed)


def _visible_mix(crops: torch.Tensor, alpha: float, key: int) -> Mix:
    """The first of the key's draws that replaces enough to be seen, or the one that replaces most."""
    count, size = crops.shape[0] * crops.shape[1], crops.shape[-2:]
    draws = [draw_cutmix(count, *size, alpha, numpy_rng(key, "cutmix", n)) for n in range(SHOWN_DRAWS)]
    return next((mix for mix in draws if mix.lam <= 1 - VISIBLE), min(draws, key=lambda mix: mix.lam))
