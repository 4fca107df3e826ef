"""From a folder of images to predictions and pictures, with the functions that the commands call.

FOLDER=photos OUT=runs/own EPOCHS=20 python examples/own_folder.py

FOLDER/train/CLASS/* and FOLDER/test/CLASS/* are labelled images, FOLDER/unlabelled/** more of them, if there are any.
"""

# %% What to train on, and for how long
import json
import os
from pathlib import Path

import matplotlib.pyplot as plt

import idmm
from idmm.cli import main

folder, out = Path(os.environ.get("FOLDER", "photos")), Path(os.environ.get("OUT", "runs/own"))
data = {"root": str(folder), "workers": 0}
train = {"epochs": int(os.environ.get("EPOCHS", "20")), "batch_size": 32}
# %% Pretrain a small ConvNet on all images without their labels: two crops without colours, as suits small images
model = {"name": "resnet10t", "kwargs": {"channels": [32, 64, 128, 256]}}
method = {"classifier": "cosine", "classifier_lr_scale": 10, "classifier_init": "features", "cutmix_alpha": 0}
views = {"size": 32, "crops": [{"count": 2, "scale": [0.35, 1.0]}], "jitter_prob": 0, "grey_prob": 0, "blur_prob": 0}
config = {"data": data, "train": train, "model": model, "method": method, "views": views, "out": str(out / "a")}
print("pretrained: loss", idmm.pretrain(config)["loss"])
# %% How good are the frozen features?
probe = idmm.probe({"init": str(out / "a"), "data": data, "out": str(out / "probe")})
print(f"kNN {probe['knn']:.1f} %, linear probe {probe['top1']:.1f} %")
# %% Which images are alike? Tables and sheets of thumbnails
main(["explore", str(out / "a"), "--out", str(out / "explore")])
# %% Fine-tune on the labels, and predict
train |= {"size": 32, "lr": 1e-3, "layer_decay": 0.7}
idmm.finetune({"init": str(out / "a"), "data": data, "train": train, "out": str(out / "b")})
found = idmm.load_classifier(out / "b").predict(folder / "test", on_error="skip")
print("\n".join(f"{one.probability:6.1%}  {one.label:20} {one.path}" for one in found[:5]))
# %% Plot the loss, and the first images with what they are taken for
epochs = [json.loads(line) for line in (out / "a" / "metrics.jsonl").read_text().splitlines()]
figure, axes = plt.subplots(1, 6, figsize=(14, 2.4), layout="constrained")
axes[0].plot([row["epoch"] for row in epochs], [row["loss"] for row in epochs])
axes[0].set(xlabel="epoch", ylabel="loss")
for place, one in zip(axes[1:], found[:: max(1, len(found) // 5)], strict=False):
    place.imshow(plt.imread(one.path))
    place.set_title(f"{one.label}, {one.probability:.0%}", fontsize=9)
    place.axis("off")
figure.savefig(out / "own_folder.png", dpi=150)
