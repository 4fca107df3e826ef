"""Boxes or masks on any image files by a finished run of ``idmm detect`` or ``idmm segment``, at the files' size.

Images are prepared as in the run's own evaluation. The network runs in fp32.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from idmm.data.images import fitted
from idmm.data.views import normalise
from idmm.dense.evaluate import Objects, classes_on_file, on_file, segmented
from idmm.dense.network import saved_network
from idmm.dense.transforms import letterboxed, on_canvas, resized_to
from idmm.evaluation.network import Network
from idmm.models.weights import Checkpoint
from idmm.progress import counting
from idmm.training.device import pick_device

BATCH = 4
MIN_SCORE = 0.5  # of boxes


@torch.no_grad()
def predict_files(
    saved: Checkpoint, paths: list[str], min_score: float, unreadable: dict[str, str], device: str, batch_size: int
) -> Iterator[tuple[str, tuple[int, int], Objects | np.ndarray]]:
    """Yield path, height and width (pixels, upright) and prediction of each image, and draw the progress.

    The prediction of a detector is the objects, of a segmentation the class of each pixel, uint8 [H, W].

    Args:
        min_score: Boxes with a lower score are dropped.
        unreadable: Takes the images that cannot be read: path -> reason.
        device: Of the network, as for :func:`idmm.load_classifier`.

    Raises:
        RunError: Memory ran out.
    """
    task, device = saved.extra["task"], pick_device(device)
    network = Network.around(saved, saved_network(saved).to(device), saved.size, device, batch_size)
    sizes: dict[int, tuple[int, int]] = {}

    def prepare(number: int, pixels: np.ndarray) -> Tensor:
        sizes[number] = pixels.shape[:2]
        stored = torch.from_numpy(fitted(pixels, network.size)).permute(2, 0, 1)  # as in the run's store
        image = resized_to(stored, letterboxed(sizes[number], network.size))
        return on_canvas(normalise(image[None], network.mean, network.std)[0], network.size)

    batches = network.file_batches(paths, paths, unreadable, prepare)
    with network.enough_memory():
        for batch in counting(batches, len(paths), "predicting"):
            inputs = batch["images"].to(network.device)
            outputs = network.model(inputs) if task == "detect" else segmented(network.model, inputs)
            for number, output in zip(batch["index"].tolist(), outputs, strict=True):
                size = sizes.pop(number)
                if task == "segment":
                    prediction = classes_on_file(output, size, network.size).numpy().astype(np.uint8)
                else:
                    confident = output["scores"] >= min_score
                    output = {name: value[confident] for name, value in output.items()}
                    prediction = on_file(output, size, network.size)
                yield paths[number], size, prediction
