"""The training loop."""

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from idmm.config.base import FieldErrors, section

MONITORED = 512  # training images at most that the collapse monitor uses, the same every time


@section
class Train:
    """The training loop."""

    schedule: ClassVar[str] = "cosine"  # after the warm-up. Only detection and segmentation can choose it

    epochs: int = Field(800, ge=1)
    """Passes over the training images (epochs)."""
    minutes: float | None = Field(None, gt=0)
    """Time for the whole run instead of epochs (minutes). Schedules follow the clock. Default: epochs count."""
    max_epochs: int | None = Field(None, ge=1)
    """With minutes: most epochs over all stages, so that few images are not overfitted. Default: no limit."""
    batch_size: int = Field(256, ge=1)
    """Images per optimizer step, over all processes. The last, smaller batch is kept."""
    lr: float | None = Field(None, gt=0)
    """Peak learning rate. Default: that of the backbone's family (5e-4, for PVTv2 and T2T-ViT 1e-3)."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with momentum 0.9."""
    weight_decay: float = Field(1e-3, ge=0)
    """Weight decay: decoupled in AdamW, added to the gradient in SGD."""
    weight_decay_end: float | None = Field(None, ge=0)
    """Weight decay at the end of the run, reached along half a cosine. Default: constant."""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Layer-wise lr decay: each layer's lr is this times that of the layer above. Heads use the full lr. Default: 1."""
    warmup_epochs: float | None = Field(None, ge=0)
    """Linear warm-up (epochs). Default: 2, for PVTv2 and T2T-ViT 10."""
    accumulate: int = Field(1, ge=1)
    """Passes that a batch is split into, to save memory. Contrastive methods then compare images within a pass."""
    clip_grad: float | None = Field(None, gt=0)
    """Largest norm of the gradient. Default: no clipping."""
    clip_grad_mode: Literal["norm", "tensor"] = "norm"
    """Norm that clip_grad limits: the whole gradient's, or each 'tensor's own as in DINO's release."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay per step of averaged weights (EMA), which are then evaluated and exported. It warms up. Default: no EMA."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Arithmetic. 'auto': bf16 on GPUs that have it, the faster of fp32 and bf16 on CPUs, measured once."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device to train on. 'auto': cuda, else mps, else cpu."""
    compile: bool = False
    """Compile the model with torch.compile, which starts slower."""
    save_minutes: float = Field(5.0, ge=0)
    """Time between checkpoints (minutes). 0: every step."""

    @model_validator(mode="after")
    def _check(self):
        if self.max_epochs is not None and self.minutes is None:
            what = f"got {self.max_epochs} without minutes, expected minutes, or epochs instead"
            raise FieldErrors({"max_epochs": what})
        return self


@section
class PretrainTrain(Train):
    """The training loop."""

    warmup_epochs: float | None = Field(None, ge=0)
    """Linear warm-up (epochs). Default: mocov2 0, mocov3 40, dino 10, others 2, or 10 for PVTv2 and T2T-ViT."""
    knn_every: int = Field(0, ge=0)
    """Epochs between kNN accuracies on val or test. 0: only at the start and end of runs with --init, else never."""
    monitor_every: int = Field(1, ge=0)
    """Epochs between checks for collapse, on up to 512 training images. 0: never."""


@section
class FinetuneTrain(Train):
    """The training loop."""

    epochs: int = Field(200, ge=1)
    size: int = Field(224, ge=8)
    """Image side, if no stages are given (pixels)."""
    classifier_init: Literal["random", "features"] | None = None
    """Initial classifier: random, or a logistic regression on features. Default: features with --init or hog_conv."""
    eval_every: int = Field(10, ge=1)
    """Epochs between evaluations. Each stage's last epoch is always evaluated."""
    keep: Literal["last", "best"] = "last"
    """Weights to report and export: the last epoch's, or the best on 'val' in the last stage."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights of images in the loss. 'balanced': all classes count the same, however many images they have."""
