"""Stage 2's images: augmented for training, centre-cropped for evaluation."""

from functools import partial

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform

from idmm.config import COLOURS, Augment, CropGroup, Views
from idmm.data.images import CentreCrop
from idmm.data.values import unit
from idmm.data.views import draw_views, is_rgb8, make_views, normalise, numbered, resize
from idmm.errors import UserError
from idmm.seeding import derive, seeded


class TrainTransform:
    """Makes the augmented images of a batch, a :data:`idmm.data.loaders.BatchFn`.

    Random resized crop, flip, colour jitter and grey are those of stage 1. Then comes timm's RandAugment for RGB images
    of 8 bits, each with its own seed from (seed, stage, epoch, image). Turns are last.

    Args:
        store: Images by number, with ``labels``.
        config: Strengths and probabilities.
        size: Side of the result (pixels).
        mean, std: Of each channel. One value makes RGB images grey.
        key: From :func:`idmm.seeding.derive`, another for each seed and stage.
    """

    def __init__(self, store, config: Augment, size: int, mean, std, key: int):
        self.store, self.config, self.size, self.mean, self.std, self.key = store, config, size, mean, std, key
        self.randaugment = _randaugment(config.randaugment, size, mean) if config.randaugment else None
        shared = {name: getattr(config, name) for name in COLOURS if hasattr(config, name)}
        self.crop = CropGroup(count=1, scale=config.scale, blur_prob=0.0, solarize_prob=0.0, **shared)

    def __call__(self, epoch: int, indices: np.ndarray) -> dict:
        """Return ``images`` (float [B, C, size, size]), ``index`` and ``label``."""
        images = [self.store.image(i) for i in indices]
        key, sizes = derive(self.key, "views", epoch), self.store.sizes[indices]
        plan = draw_views(Views(), self.crop, key, indices, sizes)

        def randomly(view: np.ndarray, v: int) -> np.ndarray:
            if not is_rgb8(images[v]):
                return view
            with seeded(derive(self.key, "augment", epoch, indices[v])):
                made = self.randaugment(Image.fromarray(np.uint8(np.rint(255 * view))))
            return np.asarray(made, dtype=np.float32) / 255

        extra = randomly if self.randaugment else None
        views = make_views(images, plan, self.size, self.mean, self.std, extra)  # [B, 1, C, S, S]
        return numbered({"images": views[:, 0]}, self.store, indices)


class EvalTransform:
    """Makes the centre crops of a batch. One ``mean`` and ``std`` make RGB images grey.

    Images to evaluate on are stored as such crops. Training images are stored larger.
    """

    def __init__(self, store, size: int, crop_pct: float, mean, std):
        self.store, self.size, self.crop_pct, self.mean, self.std = store, size, crop_pct, mean, std
        self.finished = store.stored_size == CentreCrop(size, crop_pct)

    def __call__(self, epoch: int, indices: np.ndarray) -> dict:
        """Return ``images`` (float [B, C, size, size]), ``index`` and ``label``."""
        images = [self.store.image(i) for i in indices]
        if not self.finished:
            places = [CentreCrop(self.size, self.crop_pct).place(*image.shape[1:]) for image in images]
            crops = zip(images, places, strict=True)
            images = [resize(image, list(sides))[:, rows, columns] for image, (sides, (rows, columns)) in crops]
        if all(image.dtype == torch.uint8 for image in images):  # the usual case, copied as bytes
            images = unit(torch.stack(images))
        else:
            images = torch.stack([image if image.is_floating_point() else unit(image) for image in images])
        return numbered({"images": normalise(images, self.mean, self.std)}, self.store, indices)


def _randaugment(text: str, size: int, mean):
    """Return timm's RandAugment. Its strongest posterize keeps 0 bits, which Pillow 13 refuses: 1 is the least."""
    fill = tuple(round(255 * m) for m in (mean * 3)[:3])  # pixels moved in from outside the image
    try:
        transform = rand_augment_transform(text, {"translate_const": int(size * 0.45), "img_mean": fill})
    except (AssertionError, ValueError, KeyError, IndexError):
        expected = "expected timm's form, e.g. rand-m9-mstd0.5-inc1, or null"
        raise UserError(f"augment.randaugment: '{text}' is unknown, {expected}") from None
    for op in transform.ops:
        if op.name.startswith("Posterize"):
            op.level_fn = partial(_at_least_one_bit, op.level_fn)
    return transform


def _at_least_one_bit(level_fn, level, hparams):
    return (max(1, level_fn(level, hparams)[0]),)
