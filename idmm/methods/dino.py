"""DINO (Caron et al., ICCV 2021): a student's softmax follows a teacher's.

The teacher has momentum weights. Its outputs are centred and sharpened.
"""

import warnings

from lightly.loss import DINOLoss
from lightly.models.modules import DINOProjectionHead
from torch import Tensor, nn

from idmm.batch import Batch
from idmm.config import methods as options
from idmm.methods.base import Method, RunInfo, Values
from idmm.methods.common import MomentumEncoder, at_least_fp32, crops_of, full_precision
from idmm.models import Backbone, feature_width
from idmm.progress import log

OUTPUTS = 65_536  # of the paper's head
WARMUP_TEMPERATURE = 0.04
WARMUP_EPOCHS = 30  # for which the teacher's temperature rises
FROZEN_EPOCHS = 1  # for which the head's last layer is frozen
SHORT = 10  # both take at most this part of a run, a tenth


class DINO(Method):
    """Cross-entropy (Eq. 2) of every crop's softmax with the teacher's of the other global crops.

    The crops of the first group are global, and those of the next groups with its scale. The
    teacher's backbone is exported, as in the paper.
    """

    head: DINOProjectionHead
    teacher: MomentumEncoder

    def __init__(self, backbone: Backbone, info: RunInfo, config: options.DINO):
        super().__init__(backbone)
        outputs = config.outputs or _outputs(info)
        self.head = _head(feature_width(backbone), config.hidden_dim, config.dim, outputs)
        self.head.freeze_last_layer = min(FROZEN_EPOCHS, info.epochs // SHORT)
        self.teacher = MomentumEncoder(backbone, self.head, config.momentum, info.steps)
        self.warmup = min(WARMUP_EPOCHS, info.epochs // SHORT)
        self.teacher_temperature = config.teacher_temperature
        self.loss = DINOLoss(
            outputs, student_temp=config.temperature, center_momentum=config.center_momentum
        )
        self.global_groups = info.global_groups

    @property
    def exported(self) -> Backbone:
        """The teacher's backbone."""
        return self.teacher.copies[0]  # type: ignore[return-value]  # a copy of the backbone

    def temperature(self, epoch: float) -> float:
        """The teacher's temperature in an epoch, counted from 0.

        It rises linearly from 0.04 in the warm-up's first epoch to the end in its last.
        """
        share = min(1.0, epoch / max(1, self.warmup - 1)) if self.warmup else 1.0
        return WARMUP_TEMPERATURE + share * (self.teacher_temperature - WARMUP_TEMPERATURE)

    def forward(self, batch: Batch, key: int, epoch: int) -> Values:
        """Compute the loss of all crops in ``views``, of which the teacher sees the global ones."""
        crops = crops_of(batch)
        features, extra, logs = self.features(crops, key)  # [V*B, d]
        student = at_least_fp32(self.head(features)).chunk(len(crops))  # [B, K] each
        count = sum(views.shape[1] for views in batch["views"][: self.global_groups])
        teacher = at_least_fp32(self.teacher(crops[:count])).chunk(count)  # [B, K] each
        temperature = self.temperature(self.scheduled(epoch))
        with full_precision(student[0]):
            loss = self.loss(list(teacher), list(student), teacher_temp=temperature)
        return {"loss": loss + extra, **logs}

    def before_step(self, epoch: int) -> None:
        """Hold the last layer still in the first epochs."""
        self.head.cancel_last_layer_gradients(self.scheduled(epoch))

    def embed(self, features: Tensor) -> Tensor:
        """Return the student's targets [B, K] of the teacher's features [B, d].

        They are centred, and as sharp as after the warm-up.
        """
        outputs = at_least_fp32(self.teacher.copies[1](features))
        centre: Tensor = self.loss.center[0]
        return ((outputs - centre) / self.teacher_temperature).softmax(1)


def _head(width: int, hidden: int, dim: int, outputs: int) -> DINOProjectionHead:
    # the old weight_norm, which cannot be copied
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        head = DINOProjectionHead(width, hidden, dim, outputs)
    nn.utils.remove_weight_norm(head.last_layer)
    nn.utils.parametrizations.weight_norm(head.last_layer)  # the same, in a form that can
    length = head.last_layer.parametrizations.weight.original0
    nn.init.ones_(length).requires_grad_(False)
    return head


def _outputs(info: RunInfo) -> int:
    if info.images < OUTPUTS:
        log.info(f"method.outputs: {max(2, info.images)}, the number of images, not {OUTPUTS}")
    return max(2, min(OUTPUTS, info.images))
