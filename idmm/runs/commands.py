"""``idmm.pretrain`` and the like. Datasets and paths are checked before torch is imported."""

import tempfile
from dataclasses import replace
from os import PathLike
from typing import Any

from idmm.config import DetectConfig, FinetuneConfig, PretrainConfig, SegmentConfig, parsing
from idmm.config.commands import ProbeConfig
from idmm.notebook import Result
from idmm.runs.resolve import resolve_dense, resolve_finetune, resolve_pretrain, resolve_probe

Source = dict[str, Any] | str | PathLike[str]  # keys of a config, or a YAML file or recipe


def pretrain(config: PretrainConfig | Source, started_at: float | None = None) -> dict[str, Any]:
    """Pretrain a backbone by ``config.method.name`` and write it to ``config.out``.

    Args:
        config: A PretrainConfig, a mapping of its keys ('idmm pretrain --help'), or the name of a
            YAML file or recipe.
        started_at: When the command began (``clock.now()``), for ``train.minutes`` and ``seconds``.
            None: now.

    Returns:
        The content of ``result.json``: ``loss`` of the last epoch, ``start_knn`` and ``knn`` if
        measured (kNN accuracy in percent before the first step and after the last),
        ``train_size``, ``epochs``, ``minutes`` if given, ``seed``, ``seconds``, and the
        ``precision`` that was used (fp32, bf16 or fp16). With ``method.label_weight`` also the
        accuracies of :func:`idmm.finetune` on the test split, and ``labelled_size``, the training
        images whose labels were used. With ``data.folds`` the return value of
        :func:`idmm.runs.folds.pooled`.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training could not continue (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or another stop signal. The state is saved.
    """
    run = resolve_pretrain(parsing.build(PretrainConfig, config), started_at)
    from idmm.runs.folds import per_fold
    from idmm.runs.pretrain import train_backbone

    return per_fold(run, train_backbone)


def finetune(config: FinetuneConfig | Source, started_at: float | None = None) -> dict[str, Any]:
    """Fine-tune on labels, one size after the other, and write the classifier to ``config.out``.

    Args:
        config: A FinetuneConfig, a mapping of its keys ('idmm finetune --help'), or the name of a
            YAML file or recipe.
        started_at: As for :func:`pretrain`.

    Returns:
        The content of ``result.json``. Accuracies are in percent, on the test split, of the last
        epoch or, with ``train.keep`` best, of ``kept_epoch`` of the last stage: ``top1``,
        ``top5``, ``mean_per_class``, ``top1_interval`` (95 %, over groups if images come in
        groups), ``largest_class`` (of always answering the largest class), ``baseline_top1`` and
        ``baseline_train_size`` (see :func:`idmm.runs.measure.measure_baseline`). ``start_top1`` is
        top-1 before the first step, if the classifier started from a fit on features. Also
        ``num_classes``, ``train_size``, ``test_size``, ``test_groups`` if images come in groups,
        ``seed``, ``seconds`` over all resumes, ``precision`` of training (accuracies are those of
        fp32), ``params`` and, without the classifier, ``backbone_params``, ``excluded`` if
        ``data.exclude`` left images out; with ``train.minutes`` ``minutes``, the ``epochs`` of all
        stages and ``whole_epochs``. With ``data.folds`` the return value of
        :func:`idmm.runs.folds.pooled`.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training could not continue (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or another stop signal. The state is saved.
    """
    run = resolve_finetune(parsing.build(FinetuneConfig, config), started_at)
    from idmm.runs.finetune import train_classifier
    from idmm.runs.folds import per_fold

    return per_fold(run, train_classifier)


def detect(config: DetectConfig | Source, started_at: float | None = None) -> dict[str, Any]:
    """Train a detector; write it, its average precision and its boxes on the test images.

    The network is torchvision's Faster R-CNN on a feature pyramid of the backbone, or Mask R-CNN if
    all training boxes have an outline. With ``model.cascade`` three heads refine the boxes. Images
    lie on a square of ``train.size``, or with ``augment.short_side`` on a canvas of the batch.
    Boxes and masks are compared at the size of the files.

    Args:
        config: A DetectConfig, a mapping of its keys ('idmm detect --help'), or the name of a YAML
            file or recipe.
        started_at: As for :func:`pretrain`.

    Returns:
        The content of ``result.json``. It has ``ap`` (COCO's: the mean over classes and
        intersections over union of 0.50 to 0.95), ``ap50`` and ``ap75``, with masks also
        ``mask_ap``, ``mask_ap50`` and ``mask_ap75``, in percent on the test split, of the last
        epoch or, with ``train.keep`` best, of ``kept_epoch``. They are None if the split has no
        object. Further keys are ``num_classes``, ``train_size``, ``test_size``, ``epochs``,
        ``minutes`` (if set), ``seed``, ``seconds`` over all resumes and ``precision``.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training cannot continue (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or another stop signal, after the state was saved.
    """
    run = resolve_dense(parsing.build(DetectConfig, config), started_at)
    from idmm.dense.run import train_detector

    return Result(train_detector(run))


def segment(config: SegmentConfig | Source, started_at: float | None = None) -> dict[str, Any]:
    """Train a semantic segmentation; write it, its mIoU and its masks of the test images.

    The network is UPerNet on the backbone's maps. Images lie on a square of ``train.size``. Masks
    are compared at the size of the files.

    Args:
        config: A SegmentConfig, a mapping of its keys ('idmm segment --help'), or the name of a
            YAML file or recipe.
        started_at: As for :func:`pretrain`.

    Returns:
        The content of ``result.json``. It has ``miou`` (the mean of the classes' intersection over
        union), ``macc`` (the mean share of their pixels that are right) and ``pixel_accuracy``, in
        percent on the test split, of the last epoch or, with ``train.keep`` best, of
        ``kept_epoch``. They are None if no pixel has a class. Further keys are those of
        :func:`idmm.detect`.

    Raises:
        UserError: A mistake in the config or the data.
        RunError: Training cannot continue (diverged, out of memory, disk full).
        Interrupted: Ctrl-C or another stop signal, after the state was saved.
    """
    run = resolve_dense(parsing.build(SegmentConfig, config), started_at)
    from idmm.dense.run import train_segmenter

    return Result(train_segmenter(run))


def probe(config: ProbeConfig | Source) -> dict[str, Any]:
    """Measure a frozen backbone; write ``result.json`` to ``config.out`` if it is given.

    Args:
        config: A ProbeConfig, a mapping of its keys ('idmm probe --help'), or the name of a YAML
            file or recipe.

    Returns:
        The content of ``result.json``: ``top1`` (the linear probe's) and ``knn`` in percent,
        ``top5`` None, ``mean_per_class`` (the probe's) if the dataset's literature reports it,
        ``largest_class``, image counts, ``seed``, ``seconds``, and both ``readouts`` with
        intervals.

    Raises:
        UserError: No such run, no labels, or a size that the model cannot take.
        RunError: The features are not finite, or memory ran out.
    """
    config = parsing.build(ProbeConfig, config)
    if config.out:
        return _probe(config)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # nothing is to be left
        return _probe(replace(config, out=folder))


def _probe(config: ProbeConfig) -> dict[str, Any]:
    run = resolve_probe(config)
    from idmm.runs.folds import per_fold
    from idmm.runs.probe import measure_backbone

    return per_fold(run, measure_backbone)
