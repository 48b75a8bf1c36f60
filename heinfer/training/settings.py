"""The tables of a recipe, each checked by itself; `heinfer.training.recipe` puts them together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from heinfer.errors import ParameterError
from heinfer.training.datasets.registry import SETS
from heinfer.training.privacy.schedules import parse_shape

CONFIG = ConfigDict(extra="forbid")

Text = Annotated[str, Field(strict=True, min_length=1)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1)]
Inner = Annotated[float, Field(strict=True, gt=0, lt=1)]  #: a fraction that is neither 0 nor 1
Decaying = Annotated[float, Field(strict=True, ge=0, lt=1)]
Bounds = tuple[Number, Number]


def suggest(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean ...?` with the nearest of the known names, nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f", did you mean {near[0]!r}?" if near else ""


def _check_set(name: str) -> str:
    if name not in SETS:
        raise ValueError(f"unknown set {name!r}{suggest(name, SETS)}; known are {', '.join(SETS)}")
    return name


class DataFormat(StrEnum):
    """How a file or folder holds a data set."""

    NPZ = "npz"  #: one .npz archive with four arrays, six where there is a validation part
    IDX = "idx"  #: a folder with the four IDX files of MNIST, compressed by gzip or not
    CIFAR = "cifar"  #: a folder with the binary version of CIFAR-10
    CSV = "csv"  #: a table with a header, or a folder with train.csv and test.csv
    FOLDER = "folder"  #: folders train/CLASS and test/CLASS of images


class Normalisation(StrEnum):
    """Which constants bring the columns of a table to one size."""

    DECLARED = "declared"  #: ranges that the recipe or the known set declares
    NONE = "none"  #: the columns are of one size already
    PRIVATE = "private"  #: statistics of the private records; refused, with what to do instead


@dataclass(frozen=True, slots=True, config=CONFIG)
class DataSource:
    """Where the records come from, and how to read them.

    Attributes:
        name: the data set's name, for the card.
        license: the licence under which the data are distributed.
        credit: whom to name as their authors.
        set: one of `heinfer.training.datasets.registry.SETS`; fills in name, license, credit, classes and ranges.
        path: the file or folder, where the command line names none.
        format: how it holds the data; found from the file itself where it is not given.
        train_images: key of the training images, or of a table, in an .npz archive.
        train_labels: key of their labels.
        test_images: key of the test images or table.
        test_labels: key of their labels.
        merge_validation: whether to train on an archive's validation part as well. It is left out by default, also
            of the test part.
        label: column of a .csv file that holds the label.
        class_names: names of the labels 0, 1, ...; those of a .csv file's label column, which are sorted by default.
        test_fraction: part of a single .csv file that is set aside for the test.
        split_seed: decides which records those are.
        normalise: which constants bring the columns of a table to one size.
        range: smallest and largest value of every column of a table; public, never measured on private records.
        ranges: the same for single columns, by name.
    """

    name: Text
    license: Text
    credit: Text
    set: Annotated[Text, AfterValidator(_check_set)] | None = None
    path: Text | None = None
    format: DataFormat | None = None
    train_images: Text = "train_images"
    train_labels: Text = "train_labels"
    test_images: Text = "test_images"
    test_labels: Text = "test_labels"
    merge_validation: Flag = False
    label: Text = "label"
    class_names: tuple[Text, ...] = ()
    test_fraction: Inner | None = None
    split_seed: Natural = 0
    normalise: Normalisation = Normalisation.DECLARED
    range: Bounds | None = None
    ranges: dict[str, Bounds] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> DataSource:
        if self.normalise is Normalisation.PRIVATE:
            raise ValueError(
                'normalise = "private" would read the private records before the privacy accountant sees them; '
                "declare public bounds of the columns instead, as range = [low, high] or in [data.ranges]: from the "
                "units, from the instrument or from a public data set. Values outside are clipped"
            )
        for name, bounds in {"range": self.range, **self.ranges}.items():
            if bounds is not None and not bounds[0] < bounds[1]:
                raise ValueError(f"{name}: expected [low, high] with low < high, found {list(bounds)}")
        return self


@dataclass(frozen=True, slots=True, config=CONFIG)
class Augmentation:
    """Random changes of each training image, drawn anew every time it is used.

    Attributes:
        shift_pixels: largest shift along each axis, uniform.
        rotation_degrees: largest rotation about the centre in either direction, uniform.
        flip: whether to mirror left and right, every second time.
        copies: augmented copies of a record whose gradients are averaged before clipping (private training only).
    """

    shift_pixels: Annotated[float, Field(strict=True, ge=0, le=8)] = 0.0
    rotation_degrees: Annotated[float, Field(strict=True, ge=0, le=180)] = 0.0
    flip: Flag = False
    copies: Count = 1

    @property
    def changes_images(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self.shift_pixels or self.rotation_degrees or self.flip)


class OptimiserName(StrEnum):
    """Which optimiser takes the gradients."""

    SGD = "sgd"
    ADAM = "adam"
    ADAMW = "adamw"


class Decay(StrEnum):
    """How the learning rate moves during training, step by step."""

    CONSTANT = "constant"  #: the peak throughout
    COSINE = "cosine"  #: from the peak down to zero along half a cosine
    LINEAR = "linear"  #: from the peak straight down to zero
    ONE_CYCLE = "one-cycle"  #: up to the peak in the first 30 % of the steps, then down to nearly nothing


@dataclass(frozen=True, slots=True, config=CONFIG)
class Optimiser:
    """How weights follow gradients.

    Attributes:
        learning_rate: peak learning rate.
        name: the optimiser.
        momentum: of SGD.
        nesterov: whether SGD looks ahead (Nesterov momentum).
        weight_decay: decoupled for AdamW, a gradient of its own for the others.
        warmup_steps: steps in which the learning rate rises to its peak.
        decay: how it moves after that.
        ema: decay of the moving average of the weights, which is then what is released; 0 switches it off.
    """

    learning_rate: Positive
    name: OptimiserName = OptimiserName.ADAMW
    momentum: Decaying = 0.0
    nesterov: Flag = False
    weight_decay: NotNegative = 0.0
    warmup_steps: Natural = 0
    decay: Decay = Decay.CONSTANT
    ema: Decaying = 0.0

    @model_validator(mode="after")
    def _check(self) -> Optimiser:
        if self.momentum and self.name is not OptimiserName.SGD:
            raise ValueError(f'momentum is a setting of "sgd"; {self.name} has its own')
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum > 0")
        if self.warmup_steps and self.decay is Decay.ONE_CYCLE:
            raise ValueError("one-cycle has a warm-up of its own; leave warmup_steps out")
        return self


class ClippingMethod(StrEnum):
    """How a record's gradient is bounded; see `heinfer.training.privacy.clipping`."""

    FLAT = "flat"
    PER_LAYER = "per-layer"
    AUTOMATIC = "automatic"
    ADAPTIVE = "adaptive"


@dataclass(frozen=True, slots=True, config=CONFIG)
class Privacy:
    """The guarantee, and how it is spent.

    Attributes:
        target_epsilon: what the whole run may cost; the noise is found from it.
        noise_multiplier: the noise, sigma / C; what it costs is found from it.
        delta: probability of the guarantee's failure; by default min(1e-5, 1/(10 N)).
        noise_schedule: shape of the noise over the steps, as `heinfer.training.privacy.schedules` reads it.
        clipping: how a record's gradient is bounded.
        clip_norm: C, in L2; the first threshold of adaptive clipping.
        clip_norms: C of every layer, for per-layer clipping.
        layer_noise: relative noise of every layer; equal where it is not given.
        quantile: fraction of the records that adaptive clipping leaves as they are.
        threshold_learning_rate: speed of the adaptive threshold.
        count_deviation: standard deviation of the noise on the count that moves the threshold; it is paid for.
        physical_batch: records whose gradients are in memory at once; does not change the result.
        evaluation_reserve: fraction of the budget that is kept for a private evaluation.
    """

    target_epsilon: Positive | None = None
    noise_multiplier: Positive | None = None
    delta: Inner | None = None
    noise_schedule: Text = "constant"
    clipping: ClippingMethod = ClippingMethod.FLAT
    clip_norm: Positive = 1.0
    clip_norms: tuple[Positive, ...] = ()
    layer_noise: tuple[Positive, ...] = ()
    quantile: Inner = 0.5
    threshold_learning_rate: Positive = 0.2
    count_deviation: Positive | None = None
    physical_batch: Count | None = None
    evaluation_reserve: Annotated[float, Field(strict=True, ge=0, le=0.5)] = 0.0

    @model_validator(mode="after")
    def _check(self) -> Privacy:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("expected exactly one of target_epsilon and noise_multiplier")
        try:
            parse_shape(self.noise_schedule)
        except ParameterError as error:
            raise ValueError(f"noise_schedule: {error}") from error
        layered = self.clipping is ClippingMethod.PER_LAYER
        if layered != bool(self.clip_norms):
            raise ValueError('clip_norms, one for each layer, belong to clipping = "per-layer", which needs them')
        if self.layer_noise and len(self.layer_noise) != len(self.clip_norms):
            raise ValueError(f"expected one layer_noise for each of {len(self.clip_norms)} clip_norms")
        if (self.clipping is ClippingMethod.ADAPTIVE) != (self.count_deviation is not None):
            raise ValueError('count_deviation belongs to clipping = "adaptive", which needs it')
        return self


class FineTuned(StrEnum):
    """Which layers private training goes on with after pretraining; the others stay as they are."""

    ALL = "all"
    LAST = "last"  #: the last two layers with weights
    HEAD = "head"  #: the last layer with weights


@dataclass(frozen=True, slots=True, config=CONFIG)
class Pretraining:
    """Training without privacy, on public data, before anything private is read.

    Attributes:
        data: the public data; named in the card.
        epochs: passes over its training part.
        batch_size: records a step.
        learning_rate: peak learning rate of AdamW.
        layers: what is trained privately afterwards.
        freeze: names of layers that stay as pretraining left them, in addition.
    """

    data: DataSource
    epochs: Count
    batch_size: Count
    learning_rate: Positive
    layers: FineTuned = FineTuned.ALL
    freeze: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, config=CONFIG)
class Distillation:
    """Learning from a teacher that was trained on public data.

    Attributes:
        teacher: an ONNX model with the input and the classes of the network that is trained.
        temperature: divides both models' logits before they are compared.
        weight: of the teacher's answers in the loss; the labels have the rest.
    """

    teacher: Text
    temperature: Positive = 2.0
    weight: Fraction = 0.5


@dataclass(frozen=True, slots=True, config=CONFIG)
class Features:
    """How fixed features of an architecture are computed during training.

    Attributes:
        kind: scattering features.
        octaves: J; there is one choice.
        angles: L; there is one choice.
        computed_once: compute them before the first step and keep them, instead of in every step. Excludes
            augmentation, which would change the images.
    """

    kind: Literal["scattering"] = "scattering"
    octaves: Literal[2] = 2
    angles: Literal[8] = 8
    computed_once: Flag = True


@dataclass(frozen=True, slots=True, config=CONFIG)
class Polynomials:
    """Polynomials in the place of a trained network's activations; the recipe's epochs then train it on.

    Attributes:
        start: ONNX model with the trained weights, of the recipe's architecture and its options.
        degree: of every polynomial; all values of a layer share one.
        learned: whether coefficients are trained on; otherwise they stay as they were fitted.
        margin: how far ranges reach beyond what training records show, as a factor.
        range_penalty: weight in the loss of what leaves the ranges.
        average_pooling: whether max pooling becomes average pooling; it stays otherwise, and blocks end there.
    """

    start: Text
    degree: Annotated[int, Field(strict=True, ge=2, le=7)] = 2
    learned: Flag = True
    margin: Annotated[float, Field(strict=True, ge=1, allow_inf_nan=False)] = 1.25
    range_penalty: NotNegative = 1.0
    average_pooling: Flag = False


@dataclass(frozen=True, slots=True, config=CONFIG)
class Output:
    """What a release holds beside the model.

    Attributes:
        samples: test records that are written with it, to try it on.
    """

    samples: Natural = 1000
