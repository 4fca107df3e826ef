"""The training loop."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from idmm.config.base import FieldError, section

MONITORED = 512  # training images at most that the monitor looks at, the same every time


@section
class Train:
    """The training loop, common to both stages."""

    schedule: ClassVar[str] = "cosine"  # after the warm-up; a key of detection and segmentation alone

    epochs: int = Field(800, ge=1)
    """Passes over the training images (epochs)."""
    minutes: float | None = Field(None, gt=0)
    """Time for the whole run, from the command's start to result.json, in place of epochs. Schedules and the end follow
    the clock; stages share it in the ratio of epochs x size² (minutes); null: epochs count."""
    max_epochs: int | None = Field(None, ge=1)
    """End after so many epochs, of all stages together, though minutes leave time for more: few images, passed over a
    thousand times, are learned by heart; null: the time decides alone (epochs)."""
    batch_size: int = Field(256, ge=1)
    """Images per optimizer step, over all processes; the last, smaller batch is kept (images)."""
    lr: float | None = Field(None, gt=0)
    """Peak learning rate; null: the recipe's for the backbone's family (5e-4; PVTv2 and T2T-ViT 1e-3)."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with momentum 0.9."""
    weight_decay: float = Field(1e-3, ge=0)
    """Weight decay: decoupled in AdamW, added to the gradient in SGD."""
    weight_decay_end: float | None = Field(None, ge=0)
    """Weight decay at the end of the run, reached along half a cosine from weight_decay; null: it stays."""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Factor of the lr from each layer of the backbone to the one below it. The uppermost (the classifier, where it has
    one) learns at the run's lr, what a method adds (heads, N-way layer) as ever; null: one lr for all."""
    warmup_epochs: float | None = Field(None, ge=0)
    """Linear warm-up (epochs); null: the method's (mocov2 0, mocov3 40, dino 10), else the recipe's for the backbone's
    family (2; PVTv2 and T2T-ViT 10)."""
    accumulate: int = Field(1, ge=1)
    """Splits each batch into this many forward and backward passes, to save memory (passes). Methods that compare the
    images of a batch (SimCLR, SupCon, MoCo v3) compare those of a pass alone."""
    clip_grad: float | None = Field(None, gt=0)
    """Clips the gradient to this norm; null: no clipping."""
    clip_grad_mode: Literal["norm", "tensor"] = "norm"
    """Norm that clip_grad bounds: the whole gradient's, or each 'tensor's own, as DINO's release does."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay per step of an average of the weights, which is then evaluated and exported; null: none. It is warmed up:
    at step t at most 1 - t^(-2/3), which is 0.954 at step 100 and 0.990 at step 1,000."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic; 'auto': bf16 on GPUs that have it, on CPUs whichever of fp32 and bf16 two timed steps
    favour."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train; 'auto': cuda, else mps, else cpu."""
    compile: bool = False
    """Compile the model with torch.compile: slower to start, faster to run on GPUs."""
    save_minutes: float = Field(5.0, ge=0)
    """Write a checkpoint when the last is older than this, in mid-epoch too (minutes); 0: every step."""

    @model_validator(mode="after")
    def _check(self):
        if self.max_epochs is not None and self.minutes is None:
            raise FieldError("max_epochs", f"got {self.max_epochs} without minutes; wanted minutes, or epochs alone")
        if self.weight_decay_end is not None and self.weight_decay == 0:
            raise FieldError("weight_decay_end", f"got {self.weight_decay_end:g}, but weight_decay is 0; wanted it > 0")
        return self


@section
class PretrainTrain(Train):
    """The training loop."""

    knn_every: int = Field(0, ge=0)
    """Measure kNN accuracy of the frozen features before the first step, every so many epochs and after the last, where
    there are labels and a val or test split; 0: before the first step and after the last where there is an init, else
    never (epochs)."""
    monitor_every: int = Field(1, ge=0)
    """Look for collapse and saturation every so many epochs, on up to 512 training images; 0: never (epochs)."""


@section
class FinetuneTrain(Train):
    """The training loop."""

    epochs: int = Field(200, ge=1)
    """Passes over the training images (epochs)."""
    size: int = Field(224, ge=8)
    """Image side, when no stages are given (pixels)."""
    classifier_init: Literal["random", "features"] | None = None
    """Classifier to start from: random, or a logistic regression on the features of the training images before the
    first step, its strength chosen on some that are held out; null: 'features' where there is an init, else 'random'.
    With 'features' result.json has start_top1, the accuracy before the first step."""
    eval_every: int = Field(10, ge=1)
    """Evaluate every so many epochs, and always after a stage's last (epochs)."""
    keep: Literal["last", "best"] = "last"
    """Weights to report and export: the last epoch's, or those of the evaluated epoch with the best top-1 on 'val' in
    the last stage (the earlier of equals). Best needs a val split beside the split that is reported."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weight of each training image in the loss; 'balanced': images / (classes * images of its class), so that small
    classes count as much as large ones."""
