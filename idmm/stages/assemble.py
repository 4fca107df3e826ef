"""One way to put a run together from its config: backbone, images, method and transform, the loop's plan.

Stages and the check of a grid ask here, so that what is checked is what will run.
"""

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from idmm import distributed
from idmm.config import FinetuneConfig, global_groups, without_rgb
from idmm.data.augment import TrainTransform
from idmm.data.folder import root_folder
from idmm.data.image_store import ImageStore
from idmm.data.images import CentreCrop, StoredSize
from idmm.data.listing import list_images
from idmm.data.loaders import BatchFn, BatchPlan, centre_crops
from idmm.data.split import Listing, counted
from idmm.data.store import PARTS, Stores, image_differences, store_images
from idmm.data.values import AUTO
from idmm.data.views import MultiCropTransform, short_side_bound
from idmm.errors import Interrupted, SizeError, UserError
from idmm.evaluation.evaluators import Evaluator
from idmm.files import begun
from idmm.methods import Method, RunInfo, create_method
from idmm.methods.drloc import Localization
from idmm.methods.finetune import Finetune
from idmm.models.build import try_size
from idmm.models.hub import pinned
from idmm.models.spec import ModelSpec, model_spec
from idmm.models.start import takes_structure
from idmm.progress import counting, logging_to
from idmm.seeding import derive, seeded
from idmm.stages import Phase, beginning, prepare, stage_of
from idmm.stages.handover import decide
from idmm.training.checkpoint import RunFolder
from idmm.training.engine import StagePlan
from idmm.training.optim import recipe
from idmm.training.session import Session

log = logging.getLogger("idmm")
EVAL_CROP = 0.875  # of pretraining's features


# ---------------------------------------------------------------------- the run
class Assembly:
    """The parts of a run by its config; nothing is read or built before it is asked for.

    Args:
        config: Of the run, which may be resolved or not.
        init_field: What messages on the checkpoint to start from begin with; empty: with the file.
    """

    began: float | None = None  # when the run was called (clock.now()); None: when its session starts
    learns = "classes"  # what is known of the images, and learnt
    # Of each stage's own class; a probe has no method and no transform.
    crop_pct: float  # share of the resized short side that the centre crop of evaluation covers
    bound: Callable[[int], StoredSize]  # what is kept of training images for views of so many pixels
    method: Callable[[Phase, torch.nn.Module, int, int | None], Method]  # for so many images and classes (or None)
    transform: Callable[[Phase, ImageStore], BatchFn]  # turns image numbers into a batch

    def __init__(self, config, init_field: str = "init"):
        self.config, self.stage, self.init_field = config, stage_of(config), init_field
        self.phases = self.stage.phases(config)

    def listed(self) -> Listing:
        """Lists the images, nothing decoded."""
        return list_images(*self.stage.images(self.config))

    @property
    def device(self) -> str:
        """As the config names it."""
        return self.config.train.device

    @functools.cached_property
    def spec(self) -> ModelSpec:
        """The backbone's; UserError where it cannot be known."""
        return model_spec(self.config, self.init_field)

    def backbone(self, phase: Phase, classes: int | None = 0) -> torch.nn.Module:
        """Builds the backbone of a phase with fresh weights; ``classes`` counts where a classifier belongs to it."""
        return self.spec.build(phase.size, self.config.seed, classes, dynamic=bool(phase.others))

    def plan(
        self,
        phase: Phase,
        store: ImageStore,
        evaluators: list[Evaluator],
        ending: tuple[int, float] = (0, 0.0),
    ) -> StagePlan:
        """Returns what the loop needs to know of a phase; ``ending``: see :class:`idmm.training.engine.StagePlan`."""
        train, order = self.config.train, derive(self.config.seed, "stage", phase.number)
        ranks = (distributed.rank(), distributed.world())
        epochs, most = phase.epochs, None
        if train.minutes is not None:
            most = None if train.max_epochs is None else self._shared(train.max_epochs)[phase.number - 1]
            epochs = most or sys.maxsize
        return StagePlan(
            number=phase.number,
            label=phase.label,
            epochs=phase.epochs,
            batches=BatchPlan(len(store), phase.batch_size, epochs, order, *ranks, train.accumulate),
            transform=self.transform(phase, store),
            lr=phase.lr,
            evaluators=evaluators,
            share=self._cost(phase) / sum(map(self._cost, self.phases[phase.number - 1 :])),
            max_epochs=most,
            ending=ending,
        )

    @staticmethod
    def _cost(phase: Phase) -> int:
        """What a phase takes of ``train.minutes``, in proportion."""
        return phase.epochs * phase.size**2

    def _shared(self, most: int) -> list[int]:
        """Returns at most so many epochs in all, shared in the ratio of the phases', at least one each."""
        whole = sum(phase.epochs for phase in self.phases)
        for total in range(most, 0, -1):
            epochs = [max(1, round(total * phase.epochs / whole)) for phase in self.phases]
            if sum(epochs) <= most:
                return epochs
        return [1] * len(self.phases)

    def localization(self, phase: Phase, backbone: torch.nn.Module) -> Localization | None:
        """Makes the head of ``drloc``, its fresh weights from the run's seed; None where its weight is 0."""
        drloc = getattr(self.config, "drloc", None)
        if drloc is None or not drloc.weight:
            return None
        with seeded(derive(self.config.seed, "drloc", phase.size)):
            return Localization(backbone, drloc, phase.size, self.spec.in_chans)

    def try_model(self, phase: Phase, weights: bool = False) -> None:
        """Raises UserError where backbone, drloc's head or, if asked for, the weights to start from do not fit."""
        backbone, faults = self.backbone(phase), []
        if self.stage.name == "pretrain" and not list(backbone.parameters()):
            raise UserError(f"model.name: {self.spec.name} has no weights to pretrain; probe or fine-tune it instead")
        for field, size in phase.others:
            try:
                try_size(backbone, self.spec.name, size, self.spec.in_chans)
            except SizeError as error:
                faults += [f"{field}: {fault}" for fault in error.faults]
        if faults:
            raise UserError(*faults)
        asked = getattr(self.config.model, "start", "timm") == "structured" and self.spec.init is None
        if asked and not takes_structure(backbone):
            what = f"{self.spec.name} is none of timm's vision transformers with learned positions"
            raise UserError(f"model.start: structured, but {what}; wanted timm or auto")
        if weights:
            self.spec.load(backbone)
        self.localization(phase, backbone)

    def check_sizes(self) -> None:
        """Tries the model at every size, so that none is refused hours after the start; a begun run passed this.

        Raises:
            UserError: A line a fault, with the field.
        """
        if begun(self.config.out):
            return
        faults = []
        for phase in self.phases:
            try:
                self.try_model(phase)
            except SizeError as error:
                faults += [f"{phase.field}: {fault}" for fault in error.faults]
            except UserError as error:
                faults += error.faults
        if faults:
            raise UserError(*dict.fromkeys(faults))


class _Pretraining(Assembly):
    crop_pct = EVAL_CROP

    def bound(self, size):
        views = replace(self.config.views, size=size)
        return max(map(short_side_bound, views.group_sizes(), (group.scale[0] for group in views.crops)))

    def backbone(self, phase, classes=0):
        return super().backbone(phase, classes if self.config.learns_labels else 0)

    def method(self, phase, backbone, images, classes, labelled=None):
        sizes = (images, min(phase.batch_size, images), phase.epochs, phase.steps(images))
        whole = global_groups(self.config.views.crops, self.config.views.size)
        info = RunInfo(*sizes, classes, whole, labelled)
        with seeded(derive(self.config.seed, "method")):
            method = create_method(backbone, info, self.config.method)
        method.localization = self.localization(phase, backbone)
        return method

    def transform(self, phase, store):
        return MultiCropTransform(store, self.config.views, self.spec.mean, self.spec.std, self.config.seed)


class _Finetuning(Assembly):
    def __init__(self, config: FinetuneConfig, init_field: str = "init"):
        super().__init__(config, init_field)
        self.config = replace(config, stages=config.resolved_stages())  # as it goes into config.yaml

    def bound(self, size):
        return short_side_bound(size, self.config.augment.scale[0])

    @property
    def crop_pct(self):
        return self.config.augment.crop_pct

    def method(self, phase, backbone, images, classes):
        method = Finetune(backbone, self.config.augment, self.config.model.freeze)
        method.localization = self.localization(phase, backbone)
        return method

    def transform(self, phase, store):
        key = derive(self.config.seed, "stage", phase.number)
        return TrainTransform(store, self.config.augment, phase.size, self.spec.mean, self.spec.std, key)


class _Probing(Assembly):
    @property
    def device(self) -> str:
        return self.config.device

    @property
    def crop_pct(self):
        return self.config.crop_pct

    def bound(self, size):
        return CentreCrop(size, self.crop_pct)  # nothing else is seen of an image


_ASSEMBLIES = {"pretrain": _Pretraining, "finetune": _Finetuning, "probe": _Probing}
_ELSEWHERE = {"detect": "Detecting", "segment": "Segmenting"}  # in the stages' own modules


def assemble(config, init_field: str = "init") -> Assembly:
    """Returns the parts of a run, see :class:`Assembly`."""
    stage = stage_of(config)
    if stage.name in _ELSEWHERE:
        return getattr(importlib.import_module(stage.module), _ELSEWHERE[stage.name])(config, init_field)
    return _ASSEMBLIES[stage.name](config, init_field)


def resolve(config) -> tuple[Assembly, list[str]]:
    """Fills in what the config leaves to the method, the checkpoint, the dataset's usual statistics and the family.

    Returns:
        The run's parts, their ``config`` whole, as it goes into config.yaml; and lines for the log on what was filled
        in.

    Raises:
        UserError: The method cannot be had so, ``out`` or a library is missing, the model contradicts the checkpoint.
    """
    began = beginning()
    config, notes = prepare(config)
    spec = model_spec(config)
    if isinstance(config, FinetuneConfig):
        config, more = decide(config, spec)
        notes += more
    lr, warmup = recipe(spec.name)
    train = config.train
    for name, value in (("lr", lr), ("warmup_epochs", warmup)):
        if getattr(train, name) is None:
            train = replace(train, **{name: value})
            notes.append(f"train.{name}: {value:g}, the recipe's for {spec.name}")
    model = replace(config.model, name=spec.name, kwargs=spec.kwargs)
    own = {name: getattr(spec, name) for name in ("mean", "std", "in_chans")}
    own |= {} if spec.bands is None else {"bands": spec.bands}  # boxes and masks know no bands
    data = replace(config.data, **own)
    config, more = without_rgb(replace(config, init=pinned(config.init), train=train, model=model, data=data))
    parts = assemble(config)
    parts.spec, parts.began = spec, began  # the checkpoint is read once
    return parts, notes + more


@contextlib.contextmanager
def session(parts: Assembly, notes: list[str]) -> Iterator[Session]:
    """Opens the run's folder, log and interrupts, and closes them however the block ends.

    A new run's model is tried at every size before there is a folder, and one that is refused leaves none. A finished
    run is said to be so, else ``notes`` are logged.
    """
    parts.check_sizes()
    run = Session(parts.config, parts.began)
    with run.folder:
        with logging_to(run.folder.path), run.interrupts:
            try:
                if parts.config.data.name == "folder" and not run.folder.finished:
                    root_folder(parts.config.data)  # before the notes: what is not there is no time to read them
                if run.folder.anew:
                    why = "a run was begun here but had saved no checkpoint yet (train.save_minutes)"
                    notes = [f"{parts.config.out}: {why}, so it starts anew", *notes]
                for note in [f"{parts.config.out}: finished already, nothing to do"] if run.folder.finished else notes:
                    log.info("%s", note)
                yield run
            except KeyboardInterrupt:
                kept = run.folder.kept or "; there is no checkpoint yet"
                raise Interrupted(f"interrupted before the end of a step{kept}") from None


def say_length(run: Session, parts: Assembly, images: int) -> None:
    """Logs how many steps a run on so many training images has."""
    for phase in parts.phases:
        total, filled = phase.steps(images), min(phase.batch_size, images)
        each = counted(total // phase.epochs, "step")
        length = f"{total} in {counted(phase.epochs, 'epoch')}"
        if parts.config.train.minutes is not None:
            length = f"for train.minutes {parts.config.train.minutes:g}"
        log.info("%s: %s of %d images an epoch, %s", phase.label, each, filled, length)


# ---------------------------------------------------------------------- the images
LoadedSplits = Stores


def load_splits(parts: Assembly, folder: RunFolder | None = None, wanted: tuple[str, ...] = PARTS) -> Stores:
    """Lists the images and stores those of the splits ``wanted``, to evaluate on at each phase's size.

    A run that is resumed in ``folder`` keeps the value range, mean and std that it began with, and refuses other
    images. ``parts.spec`` has mean and std from then on.
    """
    spec, evaluated = parts.spec, parts.stage.evaluated(parts.config)
    data = replace(parts.config.data, in_chans=spec.in_chans, bands=spec.bands)
    listing = parts.listed()
    check_val(parts, listing)
    saved = folder.statistics() if folder else None
    mean, std = (known or value for known, value in zip((spec.mean, spec.std), saved or (None, None), strict=True))
    sizes = dict.fromkeys(phase.size for phase in parts.phases)
    stores = store_images(
        listing,
        data,
        parts.bound(max(sizes)),
        {size: CentreCrop(size, parts.crop_pct) for size in sizes},
        parts=wanted if evaluated else ("train",),
        value_range=folder.scale(spec.range) if folder else spec.range,
        mean=mean,
        std=std,
        progress=folder is None or folder.leader,
    ).at(parts.phases[-1].size)
    log_values(parts, stores)
    parts.spec = replace(spec, mean=stores.mean, std=stores.std)
    if folder is not None:
        folder.check_images(stores.fingerprint(), image_differences)
        counts = ", ".join(f"{len(store)} {part}" for part, store in stores.parts.items())
        how = "decoded at each use" if stores.train.decodes else "decoded once"
        log.info("images: %s of %s (%s)", counts, data.name, how)
    return stores


def log_values(parts: Assembly, stores: Stores) -> None:
    """Logs what the values of the images stand for, and images that are too small to learn from."""
    if tiny := int((stores.train.sizes.prod(axis=1) == 1).sum()):
        what = f"{tiny:,} of {counted(len(stores.train), 'training image')} have a single pixel"
        log.warning("data.root: %s: nothing but a colour can be learned from them; check the files", what)
    randaugment = getattr(getattr(parts.config, "augment", None), "randaugment", None)
    for part, store in stores.parts.items():
        if not store.high_bit:
            continue
        some = f"{store.high_bit:,} of {counted(len(store), f'{part} image')}"
        some += f" {'has' if store.high_bit == 1 else 'have'} more than 8 bits"
        ranges = ", ".join(f"[{low:g}, {high:g}]" for low, high in np.reshape(store.value_range, (-1, 2)).tolist())
        origin = f"from the {part} images" if stores.value_range is None else _origin(parts)
        log.info("images: %s; their values %s become 0 to 1 (%s)", some, ranges, origin)
        if part == "train" and randaugment:
            what = "images: augment.randaugment: left out for the %d of more than 8 bits, which it would cut to 8"
            log.info(what, store.high_bit)
    if None in (parts.spec.mean, parts.spec.std):
        mean, std = ([float(f"{value:.4g}") for value in values] for values in (stores.mean, stores.std))
        log.info("images: mean %s, std %s of the channels, measured from the training images", mean, std)


def _origin(parts: Assembly) -> str:
    """Returns where the value range of images of more than 8 bits comes from."""
    if parts.config.data.range != AUTO:
        return "data.range"
    if parts.spec.range != AUTO:
        return f"as in '{parts.spec.init.source}'" if parts.spec.init else "as in the checkpoint"
    return "from the training images"


def check_val(parts: Assembly, splits: Listing) -> None:
    """Raises UserError where a run would choose by the images that it reports."""
    if parts.stage.needs_val(parts.config) and splits.val is None:
        how = "wanted both val and test images (add a folder, or --data.val_fraction 0.2), or --train.keep last"
        raise UserError(f"train.keep: best chooses by val, and there is no split but the one that is reported; {how}")


def eval_batches(
    run: Session, parts: Assembly, store: ImageStore, size: int, count: int, *, images=None, label: str | None = None
) -> Iterator[dict]:
    """Yields this process's share of a split, centre-cropped to ``size`` (pixels), ``count`` images at a time, until
    the run is interrupted; ``images``: only those numbers. With a ``label`` the log has how many there are, and how far
    it is."""
    spec = parts.spec
    crops = centre_crops(store, size, parts.crop_pct, spec.mean, spec.std, count, run.workers, images)
    batches = run.interrupts.watch(crops)
    if label is None or not run.folder.leader:
        return batches
    log.info("%s: %d images", label, len(store))
    return counting(batches, len(store), label)
