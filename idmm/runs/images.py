"""The list of the images of a run. No torch."""

from idmm.config import FinetuneConfig, PretrainConfig
from idmm.config.commands import ProbeConfig
from idmm.config.phases import Needs
from idmm.data.listing import list_images
from idmm.data.split import Listing
from idmm.errors import UserError

ListConfig = PretrainConfig | FinetuneConfig | ProbeConfig


def list_run_images(config: ListConfig) -> Listing:
    """List the images of a run and decode nothing. UserError: it needs others."""
    needs = config.needs
    listing = list_images(config.data, needs.labels, needs.test, needs.unlabelled)
    check_images(needs, listing)
    return listing


def check_images(needs: Needs, listing: Listing) -> None:
    """Raise UserError if a run needs other images."""
    labels = listing.train.labels
    if needs.several and len(listing.train) < 2:
        raise UserError.of(
            "data.root", "1 image to train on", "Telling images apart needs at least 2"
        )
    if needs.labels and labels is not None and len({*labels} - {-1}) < 2:
        raise UserError.of(
            "data", "the training images are all of one class, expected two classes or more"
        )
    if needs.val and listing.val is None:
        raise UserError.of(
            "train.keep",
            "best chooses by val, and there is no split but the one that is reported, "
            "expected both val and test images (add a folder, or --data.val_fraction 0.2), "
            "or --train.keep last",
        )
