"""AdamW, SGD or Muon over timm's parameter groups, and the recipes' learning rates."""

from collections.abc import Iterator

import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from torch import Tensor, nn

from idmm.config import Train
from idmm.models import Backbone
from idmm.models.build import backbone_keys


def create_optimizer(
    backbone: Backbone, others: dict[str, tuple[nn.Module, float]], train: Train, lr: float
) -> torch.optim.Optimizer:
    """Build the optimizer. Biases, norms and parameters that the model exempts get no weight decay.

    Muon updates the hidden matrices and convolutions, as timm chooses them by shape. AdamW updates
    the rest, at the same rates: also position embeddings, classifiers and DINO's prototypes.

    Args:
        backbone: Its groups are timm's, without frozen parameters.
        others: A method's other modules by name, each with its learning rate as a multiple of
            ``lr``.
        train: The optimizer, its weight decay, and the factor of the lr from each of the backbone's
            layers to the one below (``layer_decay``).
        lr: Peak learning rate of the backbone's last layer and of the others.
    """
    exempt = _exempt(backbone)
    by_adamw: set[str] = set()
    if train.optimizer == "muon":
        by_adamw = exempt | _classifiers(backbone)
    if train.layer_decay in (None, 1.0):  # timm warns of 1
        groups = param_groups_weight_decay(
            backbone, train.weight_decay, no_weight_decay_list=exempt, fallback_list=by_adamw
        )
    else:
        groups = param_groups_layer_decay(
            backbone, train.weight_decay, exempt, by_adamw, layer_decay=train.layer_decay
        )
    for name, (module, scale) in others.items():
        if any(p.requires_grad for p in module.parameters()):
            last = _last_layers(name) if train.optimizer == "muon" else ()
            extra = param_groups_weight_decay(module, train.weight_decay, fallback_list=last)
            groups += [{**group, "lr_scale": scale} for group in extra]
    if train.optimizer == "muon":
        # the author's momentum, and the betas of AdamW
        muon = create_optimizer_v2(groups, "muon", lr=lr, momentum=0.95, betas=(0.9, 0.999))
        for kernel in _one_channel_kernels(backbone):  # which timm takes for depthwise ones
            muon.state[kernel]["use_muon"] = True
        return muon
    # timm's "sgd" is Nesterov's. Its momentum is 0.9
    name = {"adamw": "adamw", "sgd": "momentum"}[train.optimizer]
    return create_optimizer_v2(groups, name, lr=lr, weight_decay=0.0, fused=True)


def _exempt(backbone: Backbone) -> set[str]:
    """Return the names of position embeddings and tables: those that the model lists, and
    others."""
    exempt = set()
    no_weight_decay = getattr(backbone, "no_weight_decay", None)  # not all of timm's models have it
    if no_weight_decay is not None:
        exempt |= set(no_weight_decay())
    endings = ("pos_embed", "relative_position_bias_table", "cls_token", "dist_token")
    for name, _ in backbone.named_parameters():
        if name.split(".")[-1] in endings:
            exempt.add(name)
    return exempt


def _classifiers(backbone: Backbone) -> set[str]:
    """Return the names of the parameters of a timm model's classifiers."""
    return {name for name, _ in backbone.named_parameters()} - backbone_keys(backbone)


def _one_channel_kernels(backbone: nn.Module) -> Iterator[Tensor]:
    """Yield the trained kernels that see images of one channel."""
    for layer in backbone.modules():
        if isinstance(layer, nn.Conv2d) and layer.in_channels == 1 and layer.weight.requires_grad:
            yield layer.weight


def _last_layers(name: str) -> tuple[str, ...]:
    """Return patterns of the parameters, in a method's module, that give classes or prototypes."""
    return ("*",) if name == "classifier" else ("last_layer.*",)


def clip_gradients(module: nn.Module, limit: float, per_tensor: bool) -> None:
    """Scale gradients down to a norm of at most ``limit``, all together or ``per_tensor``."""
    parameters = [p for p in module.parameters() if p.grad is not None]
    for group in [[p] for p in parameters] if per_tensor else [parameters]:
        nn.utils.clip_grad_norm_(group, limit)
