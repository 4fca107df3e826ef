"""AdamW or SGD over timm's parameter groups, and the recipes' learning rates."""

import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from idmm.config import Train


def create_optimizer(
    backbone: nn.Module, others: dict[str, tuple[nn.Module, float]], train: Train, lr: float
) -> torch.optim.Optimizer:
    """Build the optimizer. Biases, norms and parameters that the model exempts get no weight decay.

    Args:
        backbone: Its groups are timm's, without frozen parameters.
        others: A method's other modules by name, each with its learning rate as a multiple of
            ``lr``.
        train: The optimizer, its weight decay, and the factor of the lr from each of the backbone's
            layers to the one below (``layer_decay``).
        lr: Peak learning rate of the backbone's last layer and of the others.
    """
    exempt = _exempt(backbone)
    if train.layer_decay in (None, 1.0):  # timm warns of 1
        groups = param_groups_weight_decay(
            backbone, train.weight_decay, no_weight_decay_list=exempt
        )
    else:
        groups = param_groups_layer_decay(
            backbone, train.weight_decay, exempt, layer_decay=train.layer_decay
        )
    for module, scale in others.values():
        if any(p.requires_grad for p in module.parameters()):
            extra = param_groups_weight_decay(module, train.weight_decay)
            groups += [{**group, "lr_scale": scale} for group in extra]
    # timm's "sgd" is Nesterov's. Its momentum is 0.9
    name = {"adamw": "adamw", "sgd": "momentum"}[train.optimizer]
    return create_optimizer_v2(groups, name, lr=lr, weight_decay=0.0, fused=True)


def _exempt(backbone: nn.Module) -> set[str]:
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


def clip_gradients(module: nn.Module, limit: float, per_tensor: bool) -> None:
    """Scale gradients down to a norm of at most ``limit``, all together or ``per_tensor``."""
    parameters = [p for p in module.parameters() if p.grad is not None]
    for group in [[p] for p in parameters] if per_tensor else [parameters]:
        nn.utils.clip_grad_norm_(group, limit)
