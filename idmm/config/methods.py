"""The pretraining methods."""

from typing import Literal

from pydantic import Field

from idmm.config.base import section


@section
class Method:
    """What is learned in stage 1; a method refuses fields that it does not read."""

    name: Literal["idmm", "simclr", "supcon", "mocov2", "mocov3", "dino", "supervised"] = "idmm"
    """Pretraining method; all but idmm and supervised need the extra 'baselines', supcon and supervised labels."""
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """idmm: epsilon of Eq. 17, the target's share for the other N-1 instances; supervised: for the classes."""
    cutmix_alpha: float = Field(0.5, ge=0)
    """idmm, supervised: CutMix's lambda is drawn from Beta(alpha, alpha); 0: no CutMix."""
    classifier: Literal["linear", "cosine"] = "linear"
    """The N-way layer: 'linear' (the paper's) or 'cosine' (normalised features and rows, a learned scale)."""
    classifier_bias: bool = False
    """Give the N-way layer a bias (the paper's has none)."""
    classifier_scale: float = Field(16.0, gt=0)
    """Where the cosine layer's learned scale starts."""
    classifier_lr_scale: float = Field(1.0, gt=0)
    """The N-way layer's learning rate, as a multiple of train.lr."""
    classifier_init: Literal["random", "features"] = "random"
    """Start of the N-way layer's rows: 'random', or each image's own 'features', untrained, centred, normalised."""
    classifier_init_std: float | None = Field(None, gt=0)
    """Standard deviation of random rows, normally distributed; null: uniform within 1/sqrt(d), as PyTorch's layers."""
    chunk_size: int | None = Field(None, ge=1)
    """Views whose N logits are held at a time; null: chosen from N and the batch (views)."""
    projection: bool | None = None
    """A two-layer MLP between the features and the loss; null: simclr, supcon and mocov2 have it, idmm has none."""
    hidden_dim: int | None = Field(None, ge=1)
    """Width of the MLP's hidden layers; null: the method's (mocov3 4096, dino 2048, else that of the features)."""
    dim: int | None = Field(None, ge=1)
    """Width of its outputs; null: 256."""
    temperature: float | None = Field(None, gt=0)
    """Temperature of the loss, of dino's student; null: the method's (mocov2 and mocov3 0.2, else 0.1)."""
    momentum: float | None = Field(None, ge=0, le=1)
    """mocov2, mocov3, dino: momentum of the second encoder; null: 0.999, 0.99 and 0.996, the last two rising to 1."""
    queue: int | None = Field(None, ge=1)
    """mocov2: keys of earlier batches; null: 2048, or fewer where there are few images."""
    stop_grad_conv1: bool | None = None
    """mocov3: leave the patch projection as it was drawn; null: where the backbone has one (patch_embed.proj)."""
    outputs: int | None = Field(None, ge=2)
    """dino: width of the softmax; null: 65536, or the number of images where that is smaller."""
    teacher_temperature: float | None = Field(None, gt=0)
    """dino: temperature of the teacher after its warm-up from 0.04; null: 0.07."""
    teacher_warmup_epochs: int | None = Field(None, ge=0)
    """dino: length of that warm-up; null: 30, or a tenth of a shorter run (epochs)."""
    center_momentum: float | None = Field(None, ge=0, le=1)
    """dino: momentum of the centre of the teacher's outputs; null: 0.9. 1 leaves it at zero."""
    freeze_epochs: int | None = Field(None, ge=0)
    """dino: the last layer of the head is held still for so long; null: 1, or 0 in runs under 10 epochs (epochs)."""
