"""Images are loaded once, kept or decoded again with the same result, and told apart by a fingerprint."""

import os
import pickle

import numpy as np
import pytest
import torch
from folders import HOW, faults, paint, same, section, tree
from PIL import Image

from idmm.data.image_store import store_split
from idmm.data.images import fitted, read_image
from idmm.data.listing import list_images
from idmm.data.store import compare
from idmm.errors import RunError


def mixed_folder(root):
    """Images of several sizes and formats under two classes."""
    for i, size in enumerate([(40, 30), (9, 50), (64, 64), (20, 21), (33, 12)]):
        paint(root / "train/a" / f"{i}.png", i, size)
    paint(root / "train/b/5.jpg", 5, (48, 70))
    Image.fromarray(np.array([[0, 65535]], dtype=np.uint16)).save(root / "train/b/6.png")
    return list_images(section(root), labelled=False).train


def test_pixels_are_the_same_kept_or_not_and_found_again(tmp_path, decoded):
    bound, count = 16, 2080 * 3 + 6  # bytes: three a pixel, and as many again of the image of 16 bits
    split = mixed_folder(tmp_path / "images")

    def load(cache):
        data = section(tmp_path / "images", cache=cache, cache_dir=str(tmp_path / "cache"), range=[0, 65535])
        return store_split(split, stored_size=bound, data=data)

    off, kept, again = (load(cache) for cache in ("off", "auto", "auto"))
    assert [store.decodes for store in (off, kept, again)] == [True, False, False] and len(decoded) == 14
    assert len(kept) == len(split) == 7 and kept.names == split.names and kept.classes == ["a", "b"]
    assert len(set(kept.digests)) == 7 and len(kept.digests[0]) == 32 and kept.sizes.dtype == np.int64
    assert kept.sizes.min(axis=1).max() == 16 and kept.sizes.min() == 1
    for store in (off, kept, again):
        for i, path in enumerate(split.items):
            wanted = torch.from_numpy(fitted(read_image(path, 10**8).pixels, bound)).permute(2, 0, 1)
            image = store.image(i)
            assert torch.equal(image, wanted) and image.dtype == wanted.dtype and image.stride() == wanted.stride()
            assert image.shape[1:] == tuple(kept.sizes[i])
        assert same(store, kept) and torch.equal(store.image(-1), kept.image(6))
        with pytest.raises(IndexError):
            store.image(7)
    assert len({kept.image(i).untyped_storage().data_ptr() for i in range(7)}) == 1, "views of one buffer"
    assert kept.image(0).untyped_storage().nbytes() == count


def test_images_in_memory_are_used_from_there(tmp_path):
    split, data = list_images(section(name="digits"), labelled=True).test, section(cache_dir=str(tmp_path))
    store = pickle.loads(pickle.dumps(store_split(split, stored_size=4, data=data)))
    assert not store.decodes and store.image(7).shape == (3, 4, 4) and store.labels.tolist() == split.labels.tolist()
    store = store_split(split, stored_size=None, data=data)
    np.testing.assert_array_equal(store.image(7).permute(1, 2, 0).numpy(), split.items[7])
    assert not list(tmp_path.iterdir())


def spoilt_folder(root):
    tree(root, train={"a": 2, "b": 2})
    (root / "train/a/0.png").write_bytes(b"")
    (root / "train/a/text.png").write_text("not a picture")
    (root / "train/b/gone.png").symlink_to(root / "nowhere.png")
    data = (root / "train/b/0.png").read_bytes()
    (root / "train/b/half.png").write_bytes(data[:120])
    return list_images(section(root), labelled=False).train


def test_bad_images_fail_together(tmp_path):
    split, train = spoilt_folder(tmp_path), tmp_path / "train"
    assert faults(store_split, split, stored_size=None, data=section()) == [
        f"data.root: 4 of 7 images cannot be used {HOW}:",
        f"  {train}/a/0.png: empty file",
        f"  {train}/a/text.png: not an image",
        f"  {train}/b/gone.png: no such file or directory",
        f"  {train}/b/half.png: unreadable or truncated (image file is truncated)",
    ]
    bomb = f"  {train}/a/1.png: 12 x 9 = 108 pixels, more than data.max_pixels 100"
    assert bomb in faults(store_split, split, stored_size=None, data=section(max_pixels=100))


def test_bad_images_are_skipped_aloud(tmp_path, caplog):
    split, train = spoilt_folder(tmp_path), tmp_path / "train"
    data = section(on_error="skip", cache_dir=str(tmp_path / "cache"))
    for _ in range(2):  # the second time they are known from the cache
        caplog.clear()
        store = store_split(split, stored_size=None, data=data)
        assert store.names == ["train/a/1.png", "train/b/0.png", "train/b/1.png"]
        assert store.labels.tolist() == [0, 1, 1] and len(store) == len(store.sizes) == len(store.digests) == 3
        wanted = read_image(train / "b/1.png", 10**8).pixels
        np.testing.assert_array_equal(store.image(2).permute(1, 2, 0).numpy(), wanted)
        assert caplog.text.count("data.root: left out 4 of 7 images that cannot be used:\n") == 1
        assert f"  {train}/a/0.png: empty file\n" in caplog.text


def test_no_image_is_left(tmp_path, caplog):
    tree(tmp_path, train={"a": 1})
    split = list_images(section(tmp_path), labelled=False).train
    (line, _) = faults(store_split, split, stored_size=None, data=section(on_error="skip", max_pixels=1))
    assert line == "data.root: none of the 1 images can be used:"
    assert not caplog.messages, "the files are listed once"


def test_skipping_a_whole_class_is_an_error(tmp_path):
    tree(tmp_path, train={"a": 2, "b": 1})
    (tmp_path / "train/b/0.png").write_bytes(b"")
    split = list_images(section(tmp_path), labelled=False).train
    assert faults(store_split, split, stored_size=None, data=section(on_error="skip")) == [
        "data.root: no usable image is left of the classes b"
    ]


def test_files_that_change_or_vanish_during_the_run(tmp_path):
    split = mixed_folder(tmp_path)
    store = store_split(split, stored_size=None, data=section(cache="off"))
    paint(tmp_path / "train/a/0.png", 99, (40, 30))
    with pytest.raises(RunError, match=r"^data.root: 'train/a/0.png' was changed while in use$"):
        store.image(0)
    os.remove(tmp_path / "train/a/1.png")
    with pytest.raises(RunError, match=r"^data.root: 'train/a/1.png' was fine when loaded, but now: no such file"):
        store.image(1)


# ---- the fingerprint ----


def test_fingerprint_tells_labels_and_order():
    images = {"x": "00 0", "y": "11 1", "z": "22 1"}
    old = {"classes": ["a", "b"], "images": images}
    for classes, now, lines in (
        (["a", "b"], images, []),
        (["a", "b"], {**images, "y": "11 0"}, ["1 image relabelled: y"]),
        (["a", "b"], dict(reversed(images.items())), ["2 images in another order: x, z"]),
        (["a", "b", "c"], images, ["the list of classes is another"]),
    ):
        assert compare(old, {"classes": classes, "images": dict(now)}) == lines
    unlabelled = {"classes": None, "images": {"x": "00", "y": "11", "z": "22"}}
    assert compare(old, unlabelled)[0].startswith("3 images relabelled: x")
