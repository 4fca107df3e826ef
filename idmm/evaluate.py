"""How good is it: accuracy of a classifier, and of frozen features by nearest neighbours or a linear probe."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import nn

from idmm import distributed

KNN_TEMPERATURE = 0.07  # of the neighbours' votes (Wu et al., CVPR 2018)


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[dict], device, autocast) -> dict[str, float]:
    """Returns ``top1``, ``top5`` and ``mean_per_class`` in percent over all processes' batches of images and labels.

    Where there are fewer than five classes, top-5 is 100. The mean over classes is that of their top-1 accuracies; a
    class without an image does not count.
    """
    hits = None  # float64 [3, K]: top-1, top-5 and images of each class
    with evaluating(model):
        for batch in batches:
            with autocast():
                logits = model(batch["images"].to(device, non_blocking=True))  # [B, K]
            ranked = logits.float().topk(min(5, logits.shape[1]), dim=1).indices.cpu()  # [B, 5]
            label = batch["label"]
            right = ranked == label[:, None]
            each = (right[:, 0], right.any(1), torch.ones(len(label)))
            found = torch.stack([torch.bincount(label, of.double(), logits.shape[1]) for of in each])
            hits = found if hits is None else hits + found
    parts = [part for part in distributed.gather(None if hits is None else hits.numpy()) if part is not None]
    top1, top5, count = sum(parts)  # [K] each
    seen = count > 0
    return {
        "top1": float(100 * top1.sum() / count.sum()),
        "top5": float(100 * top5.sum() / count.sum()),
        "mean_per_class": float(100 * (top1[seen] / count[seen]).mean()),
    }


@torch.no_grad()
def extract_features(backbone: nn.Module, batches: Iterable[dict], device, autocast) -> torch.Tensor:
    """Returns the pooled features of all processes' images in the images' order, float32 [N, d] on the CPU."""
    features, indices = [], []
    with evaluating(backbone):
        for batch in batches:
            with autocast():
                pooled = backbone.forward_head(
                    backbone.forward_features(batch["images"].to(device, non_blocking=True)), pre_logits=True
                )  # [B, d]
            features.append(pooled.float().cpu().numpy())
            indices.append(batch["index"].numpy())
    parts = distributed.gather((np.concatenate(features), np.concatenate(indices)))
    order = np.argsort(np.concatenate([part[1] for part in parts]))
    return torch.from_numpy(np.concatenate([part[0] for part in parts])[order])


def knn_predict(train, train_labels, test, k: int = 20) -> np.ndarray:
    """Returns the class [M] that a weighted vote of the k nearest by cosine gives to each row (Wu et al., CVPR 2018).

    Args:
        train: Features to look among, [N, d].
        train_labels: Their classes, [N].
        test: Features to classify, [M, d].
        k: Neighbours, N at most.
    """
    from sklearn.neighbors import KNeighborsClassifier

    def votes(distance):  # cosine distance is 1 - similarity
        return np.exp((1 - distance) / KNN_TEMPERATURE)

    model = KNeighborsClassifier(min(k, len(train)), metric="cosine", weights=votes)
    return model.fit(train, train_labels).predict(test)


def knn_accuracy(train, train_labels, test, test_labels, k: int = 20) -> float:
    """Returns the accuracy of :func:`knn_predict` in percent; ``test_labels`` [M] are the true classes."""
    return 100 * float(np.mean(knn_predict(train, train_labels, test, k) == np.asarray(test_labels)))


def probe_predict(train, train_labels, test, strength: float = 1.0) -> np.ndarray:
    """Returns the class [M] that a logistic regression on standardised frozen features gives to each row.

    Args:
        train: Features to fit on, [N, d].
        train_labels: Their classes, [N].
        test: Features to classify, [M, d].
        strength: Inverse of the L2 penalty (scikit-learn's C).
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=2000))
    return model.fit(train, train_labels).predict(test)


def probe_accuracy(train, train_labels, test, test_labels, strength: float = 1.0) -> float:
    """Returns the accuracy of :func:`probe_predict` in percent; ``test_labels`` [M] are the true classes."""
    return 100 * float(np.mean(probe_predict(train, train_labels, test, strength) == np.asarray(test_labels)))


class evaluating:
    """Puts a module in evaluation mode inside the block, and each of its parts back to its own mode after it."""

    def __init__(self, module: nn.Module):
        self.module = module

    def __enter__(self):
        self.training = {part: part.training for part in self.module.modules()}
        self.module.eval()

    def __exit__(self, *_):
        for part, training in self.training.items():
            part.training = training
