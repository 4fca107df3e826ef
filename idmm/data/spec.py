"""What is known of a dataset before its files are read."""

from collections.abc import Callable
from dataclasses import dataclass

from idmm import config
from idmm.data.split import Splits


@dataclass(frozen=True)
class Archive:
    """A file to download.

    Args:
        url: Where it is.
        checksum: ``md5:HEX`` or ``sha256:HEX``; None where its publishers and users state none.
        into: Folder under ``data.root`` that it is unpacked into, or put into if it is no archive.
    """

    url: str
    checksum: str | None
    into: str = ""

    @property
    def name(self) -> str:
        """Its file name."""
        return self.url.rpartition("/")[2].partition("?")[0]


@dataclass(frozen=True)
class Spec:
    """A dataset.

    Args:
        name: Value of ``data.name``.
        num_classes, train_size, test_size: Its protocol's figures; None where they come from the data.
        read: Called with the config's ``data`` section and whether labels are wanted; returns all that the dataset
            has, before ``val_fraction`` and ``subset``. Raises UserError.
        title: Its full name and what its splits are.
        metric: What the literature reports: ``top1``, or ``mean_per_class`` (which is then reported beside top-1).
        citation: Authors, title, venue.
        licence: What its publishers allow, in a few words; no legal advice.
        source: Its page.
        layout: Files and folders that it needs under ``data.root``, as its publishers lay them out.
        archives: What ``idmm data download`` fetches.
        manual: How to get it where it cannot be downloaded without a login or at all.
    """

    name: str
    num_classes: int | None
    train_size: int | None
    test_size: int | None
    read: Callable[[config.Data, bool], Splits]
    title: str
    metric: str = "top1"
    citation: str = ""
    licence: str = ""
    source: str = ""
    layout: tuple[str, ...] = ()
    archives: tuple[Archive, ...] = ()
    manual: str = ""

    @property
    def embedded(self) -> bool:
        """Whether a package ships it: it has no files and no ``data.root``."""
        return not self.layout
