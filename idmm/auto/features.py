"""A step of ``idmm train``: the features of all training images, which are computed once."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch

from idmm import distributed
from idmm.auto.plan import FEATURES, HOG_CONV, NETWORK, TrainState
from idmm.batch import Batch
from idmm.config import Data
from idmm.config.base import CROP_MODES
from idmm.config.commands import TrainCommand
from idmm.data.images import CentreCrop
from idmm.data.loaders import centre_crops
from idmm.data.split import Listing, Split
from idmm.data.store import Stores, store_images
from idmm.evaluation import Floats, Integers
from idmm.evaluation.evaluate import outputs_in_order
from idmm.files import Json, replacing
from idmm.models import create_backbone
from idmm.models.build import export_kwargs
from idmm.models.hog import SIDE
from idmm.models.hog_conv import IMAGES, HogConv
from idmm.models.spec import ModelSpec
from idmm.models.weights import save_model
from idmm.progress import counting, duration, log
from idmm.runs.outputs import image_entries
from idmm.seeding import derive, numpy_rng, seeded
from idmm.text import counted
from idmm.training import clock
from idmm.training.device import pick_device

ROWS = "rows.npz"
BATCH = 16  # images at a time: on CPUs more are slower (benchmarks/results/speed.md)
MOST_UNLABELLED = 20_000  # images without a label whose features are computed
TIME_SHARE = 0.8  # of the time, after which other images get no features


@dataclass(frozen=True)
class Features:
    """Training images with their features."""

    train: Split
    rows: Floats  # [N, d]

    def take(self, numbers: Integers) -> "Features":
        """Return some of the images."""
        return Features(self.train.take(numbers), self.rows[numbers])

    def labelled(self) -> "Features":
        """Return the images that have a label."""
        return self.take(np.flatnonzero(self.train.known_labels >= 0))


def training_features(
    command: TrainCommand,
    state: TrainState,
    data: Data,
    spec: ModelSpec,
    train: Split,
    minutes: float,
) -> Features | None:
    """Return the features of the training images. None: in another process than the first.

    All processes must call together. If time is short, some images are left out, never all of a
    class.

    OUT/features gets the network that computes them, and the features themselves, so that a
    resumed command has both. OUT/network gets the same with a network that will learn.

    Args:
        command: Its folder, device and seed are used.
        state: Its plan has the sizes of images, and the network that will learn next to the
            features.
        data: The images as the command reads them.
        spec: The network that will learn. If it starts from weights and the plan has sizes for
            them, their features are used, too.
        train: All images to train on.
        minutes: That are left for all steps.
    """
    deadline = clock.now() + 60 * TIME_SHARE * minutes
    folder = Path(command.out) / FEATURES
    images = _used_images(train, command.seed)
    if not distributed.broadcast((folder / ROWS).exists()):
        stores = store_images(
            Listing(images),
            data,
            state.plan.features_size,
            {},
            value_range=spec.range,
            mean=spec.mean,
            std=spec.std,
        )
        if distributed.rank() == 0:
            _write_features(command, state, stores, spec, deadline)
    distributed.broadcast(None)  # the others wait for the files
    if distributed.rank() > 0:
        return None
    with np.load(folder / ROWS) as saved:
        return Features(images.take(saved["images"]), saved["rows"])


def _write_features(
    command: TrainCommand, state: TrainState, stores: Stores, spec: ModelSpec, deadline: float
) -> None:
    """Write the files of :func:`training_features`, the features last."""
    started_at = time.monotonic()
    folder = Path(command.out) / FEATURES
    plan = state.plan
    network = {"name": spec.name, "kwargs": spec.kwargs}
    kwargs: Json = {"learned": network | {"size": plan.size}}
    if plan.frozen_sizes:
        kwargs["frozen"] = network | {"sizes": plan.frozen_sizes}
    model = _network(command, kwargs, stores, spec)
    numbers, rows = _rows(model, stores, state, command, deadline)
    _save(Path(command.out) / NETWORK, model, kwargs, stores, state, spec)
    model.learned = None
    _save(folder, model, kwargs | {"learned": {}}, stores, state, spec)
    with replacing(folder / ROWS) as file:
        np.savez(file, images=numbers, rows=rows)
    if len(rows) < len(stores.train):
        log.warning(
            "features: there was time for %d of %d images. Try more --minutes",
            len(rows),
            len(stores.train),
        )
    log.info(
        "%d features of %s in %s",
        rows.shape[1],
        counted(len(rows), "image"),
        duration(time.monotonic() - started_at),
    )


def _used_images(train: Split, seed: int) -> Split:
    """Return the images without most of those that have no label, if they are very many."""
    unlabelled = np.flatnonzero(train.known_labels < 0)
    if len(unlabelled) <= MOST_UNLABELLED:
        return train
    drawn = numpy_rng(seed, "unlabelled").permutation(unlabelled)[:MOST_UNLABELLED]
    labelled = np.flatnonzero(train.known_labels >= 0)
    log.info("features: %d of %d images without a label are used", len(drawn), len(unlabelled))
    return train.take(np.sort(np.concatenate([labelled, drawn])))


def _network(command: TrainCommand, kwargs: Json, stores: Stores, spec: ModelSpec) -> HogConv:
    """Build ``hog_conv``. Both of its networks start from the weights, if there are some."""
    with seeded(derive(command.seed, "model")):
        backbone = create_backbone(HOG_CONV, in_chans=stores.train.channels, **kwargs)
    model = cast(HogConv, backbone.eval())
    model.set_statistics(stores.mean, stores.std)
    for part in (model.frozen, model.learned):
        if part is not None and spec.init is not None:
            log.info("%s", spec.init.load_into(part.network))
    return model


def _rows(
    model: HogConv, stores: Stores, state: TrainState, command: TrainCommand, deadline: float
) -> tuple[Integers, Floats]:
    """Find mixtures and centre of the model. Return numbers of images, [N], and features, [N, d].

    After ``deadline`` no others are added.
    """
    device = pick_device(command.device)
    crop_mode = CROP_MODES[state.counts.crop_mode]

    def crops(size: int, numbers: Integers) -> Iterator[Batch]:
        crop = CentreCrop.of(size, 1.0, crop_mode, stores.mean)
        images = np.repeat(numbers, distributed.world())  # this process takes all of them
        return centre_crops(stores.train, crop, stores.mean, stores.std, BATCH, images=images)

    count = len(stores.train)
    some = numpy_rng(command.seed, "features").permutation(count)[:IMAGES]
    model.learn_mixtures(crops(SIDE, some), command.seed)
    model.to(device)
    order = _order_of_use(stores.train.known_labels, command.seed)
    batches = crops(state.plan.features_size, order)
    in_time = _until(deadline, batches, least=len(np.unique(stores.train.known_labels)))
    (numbers, raw) = outputs_in_order(
        model,
        counting(in_time, count, "taking features"),
        lambda batch: [batch["index"], model.raw(batch["images"].to(device))],
        local=True,
    )
    model.centre.copy_(torch.from_numpy(raw.mean(axis=0)))
    rows = torch.from_numpy(raw)
    for part in rows.split(BATCH):  # in place, as there may be gigabytes
        part.copy_(model.scaled(part.to(device)))
    return numbers, raw


def _order_of_use(labels: Integers, seed: int) -> Integers:
    """Return the numbers of all images: one of each class, other labelled ones, those without a
    label."""
    drawn = numpy_rng(seed, "order").permutation(len(labels))
    labelled = drawn[labels[drawn] >= 0]
    _, firsts = np.unique(labels[labelled], return_index=True)
    return np.concatenate([labelled[firsts], np.delete(labelled, firsts), drawn[labels[drawn] < 0]])


def _until(deadline: float, batches: Iterator[Batch], least: int) -> Iterator[Batch]:
    """Yield batches until the deadline, but at least so many images."""
    images = 0
    for batch in batches:
        yield batch
        images += len(batch["index"])
        if images >= least and clock.now() >= deadline:
            return


def _save(
    folder: Path, model: HogConv, kwargs: Json, stores: Stores, state: TrainState, spec: ModelSpec
) -> None:
    """Write the model, weights and JSON."""
    save_model(
        folder,
        "backbone",
        model.state_dict(),
        name=HOG_CONV,
        kwargs=export_kwargs(HOG_CONV, kwargs, None, stores.train.channels),
        mean=stores.mean,
        std=stores.std,
        size=state.plan.features_size,
        crop_pct=1.0,
        crop_mode=CROP_MODES[state.counts.crop_mode],
        extra=image_entries(spec, stores),
    )
