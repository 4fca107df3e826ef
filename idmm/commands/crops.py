"""What a stage sees of its images: originals, their crops, and what CutMix makes of them."""

import numpy as np
import torch

from idmm.config import Augment, Views
from idmm.data.augment import TrainTransform
from idmm.data.views import MultiCropTransform
from idmm.mixing import Mix, draw_cutmix, mix_images
from idmm.report.svg import ImageBlock
from idmm.seeding import derive, numpy_rng

VISIBLE = 0.2  # least share of a crop that the sheet's CutMix replaces
EPOCHS = 5  # of fine-tuning whose images are shown
SHOWN_DRAWS = 100  # draws among which one as large as that is looked for


def crop_blocks(
    store, views: Views, *, mean, std, cutmix_alpha: float = 0.0, images: int = 6, seed: int = 0
) -> list[ImageBlock]:
    """Returns a row for each image: the original, then its crops of each group.

    The crops are those of the first epoch of a run of that seed, made by the loader's own code, with normalisation
    undone. With CutMix, every group follows a second time as mixed for the network, by the first draw whose box is
    large enough to see; in training many boxes are smaller.

    Args:
        store: Images by number, as :class:`idmm.data.views.MultiCropTransform` takes them.
        views: Crops and colours.
        mean: Of each channel.
        std: Likewise.
        cutmix_alpha: The method's; 0: no CutMix.
        images: Rows, spread evenly over the dataset.
        seed: Of the run.
    """
    indices = spread_out(len(store), images)
    batch = MultiCropTransform(store, views, mean, std, seed)(0, indices)
    blocks = [_originals(store, indices)]
    for number, (crops, group) in enumerate(zip(batch["views"], views.crops, strict=True)):
        low, high = group.scale
        side = "" if group.size is None else f", {group.size} px"
        blocks.append((f"crops of {low:.0%} to\n{high:.0%} of the area{side}", _pixels(crops, mean, std)))
        if cutmix_alpha:
            blocks.append(_mixed(crops, cutmix_alpha, derive(seed, "crop sheet", number), mean, std))
    return blocks


def augmented_blocks(store, augment: Augment, size: int, *, mean, std, key: int, images: int = 6) -> list[ImageBlock]:
    """Returns a row for each image: the original, and what fine-tuning makes of it in its first epochs.

    With CutMix, the first epoch's follow as :func:`crop_blocks` shows crops.

    Args:
        store: Images by number, as :class:`idmm.data.augment.TrainTransform` takes them.
        augment: How they are changed.
        size: Side of the result (pixels).
        mean, std, images: As of :func:`crop_blocks`.
        key: Of the run's stage.
    """
    indices = spread_out(len(store), images)
    transform = TrainTransform(store, augment, size, mean, std, key)
    made = torch.stack([transform(epoch, indices)["images"] for epoch in range(EPOCHS)], 1)  # [B, EPOCHS, C, S, S]
    blocks = [_originals(store, indices), (f"as seen in\nepochs 1 to {EPOCHS}", _pixels(made, mean, std))]
    if augment.cutmix_alpha:
        blocks.append(_mixed(made[:, :2], augment.cutmix_alpha, derive(key, "crop sheet"), mean, std))
    return blocks


def spread_out(count: int, images: int) -> np.ndarray:
    """Returns so many image numbers, of ``count``, or all."""
    return np.unique(np.linspace(0, count - 1, min(images, count)).astype(int))


def _originals(store, indices: np.ndarray) -> ImageBlock:
    return "original", [[store.image(i).permute(1, 2, 0).numpy()] for i in indices]


def _mixed(crops: torch.Tensor, alpha: float, key: int, mean, std) -> ImageBlock:
    mix = _visible_mix(crops, alpha, key)
    mixed = mix_images(crops.flatten(0, 1), mix).unflatten(0, crops.shape[:2])
    return f"after CutMix\n({mix.lam:.0%} its own pixels)", _pixels(mixed, mean, std)


def _visible_mix(crops: torch.Tensor, alpha: float, key: int) -> Mix:
    """The first of the key's draws that replaces enough to be seen, or the one that replaces most."""
    count, size = crops.shape[0] * crops.shape[1], crops.shape[-2:]
    draws = [draw_cutmix(count, *size, alpha, numpy_rng(key, "cutmix", n)) for n in range(SHOWN_DRAWS)]
    return next((mix for mix in draws if mix.lam <= 1 - VISIBLE), min(draws, key=lambda mix: mix.lam))


def _pixels(views: torch.Tensor, mean, std) -> list[list[np.ndarray]]:
    """Undoes normalisation, [B, count, C, S, S] -> rows of [S, S, 3] in [0, 1]."""
    shape = (-1, 1, 1)
    values = views * torch.tensor(std).reshape(shape) + torch.tensor(mean).reshape(shape)
    values = values.clamp(0, 1).expand(-1, -1, 3, -1, -1).permute(0, 1, 3, 4, 2)  # one channel is shown as grey
    return [list(row) for row in values.numpy()]
