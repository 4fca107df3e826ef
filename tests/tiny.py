"""Every pretraining method on a tiny backbone, made the way a run makes it, and batches for it."""

import torch
from helpers import run_info

from idmm import config
from idmm.methods import create_method
from idmm.methods.drloc import Localization
from idmm.models import create_backbone
from idmm.seeding import seeded

SIDE = 16
VIT = dict(patch_size=8, embed_dim=16, depth=1, num_heads=2)
HEADS = {  # widths that a test can wait for
    "mocov3": dict(hidden_dim=12, dim=6),
    "dino": dict(hidden_dim=12, dim=6, outputs=9),
}
GROUPS = dict.fromkeys(("simclr", "mocov2", "mocov3"), (2,))  # of crops, else 2 and 1


def backbone(**kwargs):
    with seeded(0):
        return create_backbone("vit_tiny_patch16_224", SIDE, **{**VIT, **kwargs})


def make(name, of=None, info=None, drloc=None, **fields):
    """A method by name, resolved as the command line would; ``of`` is its backbone, ``info`` its
    RunInfo."""
    settings = config.PretrainConfig(
        method=config.METHODS[name](**{**HEADS.get(name, {}), **fields})
    )
    resolved, _ = settings.fill_from_method()
    of = backbone() if of is None else of
    with seeded(1):
        method = create_method(of, info or run_info(11, classes=3), resolved.method)
        method.localization = None if drloc is None else Localization(of, drloc, SIDE, 3)
    return method.train()


def batch(*counts, images=4, double=True, seed=1):
    """Groups of ``counts`` crops of each image; instances and classes are no ranges."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    views = [
        torch.randn(images, n, 3, SIDE, SIDE, generator=generator, dtype=dtype)
        for n in counts or (2,)
    ]
    label = torch.tensor([2, 0, 2, 1, 1, 0])[:images]
    return {
        "views": views,
        "index": torch.randperm(11, generator=generator)[:images],
        "label": label,
    }


def moved(batch, move):
    """A batch of tensors and lists of tensors, each moved."""
    after = {}
    for name, value in batch.items():
        after[name] = [move(one) for one in value] if isinstance(value, list) else move(value)
    return after


def gradients(loss, method):
    """Gradients by parameter's name; those that the loss does not reach are left out."""
    named = {name: p for name, p in method.named_parameters() if p.requires_grad}
    values = torch.autograd.grad(loss, named.values(), allow_unused=True)
    return {name: grad for name, grad in zip(named, values, strict=True) if grad is not None}


def assert_same_loss(method, data, naive, epoch=0, key=5, **tolerance):
    """The method's loss and the gradients of all its parameters are those of ``naive(method,
    given)``."""
    tolerance = tolerance or dict(rtol=1e-9, atol=1e-11)
    expected = naive(method, data)
    expected_gradients = gradients(expected, method)
    loss = method(data, key, epoch)["loss"]
    torch.testing.assert_close(loss, expected.to(loss.dtype), **tolerance)
    grads = gradients(loss, method)
    assert len(grads) > 10
    assert all(bool(torch.isfinite(grad).all()) for grad in grads.values())
    torch.testing.assert_close(grads, expected_gradients, **tolerance)
    return float(loss.detach())
