"""What is known of data sets that a recipe may name: names, licences, classes, public ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Ranges = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class KnownSet:
    """A data set that many use.

    Attributes:
        title: its name in full, for the card.
        license: under which it is distributed.
        credit: whom to name as its authors.
        class_names: names of the labels 0, 1, ...
        input_shape: shape of one record: channels, height and width of an image, or the number of features.
        ranges: smallest and largest value of each feature, from what is published; empty for images.
        packaged: whether scikit-learn brings it, so that there is no file to name.
    """

    title: str
    license: str
    credit: str
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    ranges: Ranges = ()
    packaged: bool = False


_DIGITS = tuple("0123456789")
_CLOTHES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
_BLOOD_CELLS = (
    "basophil", "eosinophil", "erythroblast", "immature granulocyte", "lymphocyte", "monocyte", "neutrophil",
    "platelet",
)  # fmt: skip
_CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

#: Mean, standard error and worst of ten properties of cell nuclei. The bounds are the minimum and maximum that the
#: set's published description states (UCI Machine Learning Repository; `sklearn.datasets.load_breast_cancer().DESCR`),
#: rounded outwards to two digits. Values outside are clipped, so the bounds hold for any record.
_BREAST_CANCER: Ranges = (
    (6.9, 29.0), (9.7, 40.0), (43.0, 190.0), (140.0, 2600.0), (0.05, 0.17),
    (0.01, 0.35), (0.0, 0.43), (0.0, 0.21), (0.1, 0.31), (0.04, 0.1),
    (0.1, 2.9), (0.3, 4.9), (0.7, 22.0), (6.0, 550.0), (0.0, 0.04),
    (0.0, 0.14), (0.0, 0.4), (0.0, 0.06), (0.0, 0.08), (0.0, 0.03),
    (7.0, 37.0), (12.0, 50.0), (50.0, 260.0), (180.0, 4300.0), (0.07, 0.23),
    (0.02, 1.1), (0.0, 1.3), (0.0, 0.3), (0.1, 0.67), (0.05, 0.21),
)  # fmt: skip

SETS: Mapping[str, KnownSet] = MappingProxyType(
    {
        "mnist": KnownSet(
            "MNIST", "CC BY-SA 3.0", "Yann LeCun, Corinna Cortes and Christopher J. C. Burges", _DIGITS, (1, 28, 28)
        ),
        "fashion_mnist": KnownSet("Fashion-MNIST", "MIT", "Zalando SE", _CLOTHES, (1, 28, 28)),
        "cifar10": KnownSet(
            "CIFAR-10", "none stated", "Alex Krizhevsky, Vinod Nair and Geoffrey Hinton", _CIFAR, (3, 32, 32)
        ),
        "pneumoniamnist": KnownSet(
            "PneumoniaMNIST (MedMNIST v2)",
            "CC BY 4.0",
            "Jiancheng Yang et al., after Daniel Kermany et al.",
            ("normal", "pneumonia"),
            (1, 28, 28),
        ),
        "bloodmnist": KnownSet(
            "BloodMNIST (MedMNIST v2)",
            "CC BY 4.0",
            "Jiancheng Yang et al., after Andrea Acevedo et al.",
            _BLOOD_CELLS,
            (3, 28, 28),
        ),
        "breast_cancer": KnownSet(
            "Breast Cancer Wisconsin (Diagnostic)",
            "CC BY 4.0",
            "William Wolberg, Olvi Mangasarian and Nick Street",
            ("malignant", "benign"),
            (30,),
            _BREAST_CANCER,
            packaged=True,
        ),
        "digits": KnownSet(
            "Optical Recognition of Handwritten Digits (test part)",
            "CC BY 4.0",
            "Ethem Alpaydin and Cenk Kaynak",
            _DIGITS,
            (1, 8, 8),
            packaged=True,
        ),
    }
)
