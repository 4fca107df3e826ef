"""Backbones that no run had to write, and their features taken by hand; runs' classifiers by timm
alone."""

import timm
import torch
from helpers import VIT, read
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from timm.data import create_transform, resolve_model_data_config

import idmm
from idmm import config
from idmm.data.listing import list_images
from idmm.models import create_backbone
from idmm.models.weights import save_model
from idmm.seeding import seeded

NAME = "vit_tiny_patch16_224"
MEAN = (0.4, 0.5, 0.6)
STD = (0.2, 0.3, 0.25)


def a_run(folder, seed=0, size=16, model=None, **info):
    """What a run leaves of its backbone; its weights are fresh."""
    with seeded(seed):
        model = model or create_backbone(NAME, size, **VIT)
    kwargs = {**VIT, "num_classes": 0, "img_size": size}
    info = {"name": NAME, "kwargs": kwargs, "mean": MEAN, "std": STD, **info}
    save_model(folder, "backbone", model.state_dict(), **info)
    return folder


def exported(run):
    """A run's classifier by timm alone, and what its JSON says."""
    info = read(run / "model.json")
    model = timm.create_model(info["name"], **info["kwargs"])
    model.load_state_dict(load_file(run / "model.safetensors"), strict=True)
    return model.eval(), info


def timms(info):
    """timm's transform from a run's JSON."""
    return create_transform(
        info["size"],
        **{k: info[k] for k in ("crop_pct", "crop_mode", "interpolation", "mean", "std")},
    )


def linear(train, labels, c):
    model = make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=2000))
    return model.fit(train, labels)


def by_timm(run, files):
    """Features of images by the public backbone and timm's transform."""
    backbone = idmm.load_backbone(run)
    transform = create_transform(**resolve_model_data_config(backbone))
    with torch.inference_mode():
        return backbone(torch.stack([transform(Image.open(file)) for file in files])).numpy()


def by_hand(run, size=16, crop_pct=0.875, part="train"):
    """Features of digits by the public interface and timm's transform."""
    backbone = idmm.load_backbone(run, img_size=size)
    split = getattr(list_images(config.Data(), labelled=True), part)
    transform = create_transform(**{**resolve_model_data_config(backbone), "crop_pct": crop_pct})
    images = torch.stack([transform(Image.fromarray(item)) for item in split.items])
    with torch.no_grad():
        return backbone(images).numpy(), split.labels
