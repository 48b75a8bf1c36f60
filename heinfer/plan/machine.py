"""What a machine takes for the parts of a query, and the link between node and server.

    shipped constants (an AMD EPYC) --or--> machine.json, which `heinfer bench --calibrate` writes --> Machine

Forecasts (`heinfer.plan.forecast`) are sums of these constants. The file lies in the user's configuration, or where
HEINFER_MACHINE says.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from heinfer.errors import InputError
from heinfer.operators.steps import CONFIG
from heinfer.plan.files import write_file
from heinfer.processes import core_count

#: Names another file of constants.
VARIABLE: Final = "HEINFER_MACHINE"
Seconds = Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, config=CONFIG)
class Machine:
    """Seconds of one core, for each of something. Waiting for the processor is part of them where they were measured.

    Attributes:
        name: processor, for people.
        cores: what products, transforms and SEAL are spread over.
        exchange_s: message and answer between two processes: system calls, the session, waking up.
        byte_s: byte from process to process on one machine.
        step_s: step of the node: one call of onnxruntime.
        operator_s: operator of such a step.
        step_value_s: value that a step reads or makes: operators, scales, bounds.
        node_block_s: block, encrypted and decrypted in prepared mode, values aside.
        up_s: value that is scaled, masked and packed.
        down_s: value that is unpacked, corrected and scaled back.
        server_block_s: block on the server, values and products aside.
        residue_s: residue that the server unpacks or packs, split into limbs or joined from them.
        product_s: multiply-add on the server, both limbs.
        weight_s: weight that is read from memory, once a request.
        transform_s: coefficient and level of a product of polynomials.
        dense_s: residue of a dense hint times a secret.
        mask_s: value that a mask and a correction are written for.
        preparation_s: block that is prepared, for one sample or a transform's lanes of them; products aside.
        seal_s: coefficient of a ciphertext that SEAL encrypts or decrypts.
        chain_seal_s: residue of a deep block that SEAL encrypts or decrypts, packed or unpacked.
        pass_s: residue that passes into or out of SEAL on the server.
        combine_s: residue that a product, a sum or a constant makes there.
        rescale_s: residue that a rescaling reads.
        switch_s: residue of a key that a relinearisation reads.
    """

    name: str
    cores: Annotated[int, Field(ge=1, le=4096)]
    exchange_s: Seconds
    byte_s: Seconds
    step_s: Seconds
    operator_s: Seconds
    step_value_s: Seconds
    node_block_s: Seconds
    up_s: Seconds
    down_s: Seconds
    server_block_s: Seconds
    residue_s: Seconds
    product_s: Seconds
    weight_s: Seconds
    transform_s: Seconds
    dense_s: Seconds
    mask_s: Seconds
    preparation_s: Seconds
    seal_s: Seconds
    chain_seal_s: Seconds
    pass_s: Seconds
    combine_s: Seconds
    rescale_s: Seconds
    switch_s: Seconds


#: What `heinfer bench --calibrate` finds on two virtual cores of an AMD EPYC, rounded, in its quieter hours.
SHIPPED: Final = Machine(
    name="AMD EPYC",
    cores=2,
    exchange_s=5e-4,
    byte_s=7e-10,
    step_s=2.2e-4,
    operator_s=8e-7,
    step_value_s=9e-10,
    node_block_s=1.1e-4,
    up_s=4.5e-9,
    down_s=6e-9,
    server_block_s=1.9e-4,
    residue_s=6e-9,
    product_s=2.9e-10,
    weight_s=2e-10,
    transform_s=5.5e-10,
    dense_s=3.5e-10,
    mask_s=8e-9,
    preparation_s=4e-4,
    seal_s=2.2e-7,
    chain_seal_s=1.2e-7,
    pass_s=6e-8,
    combine_s=8e-9,
    rescale_s=2.2e-8,
    switch_s=1.2e-8,
)


@dataclass(frozen=True, slots=True, config=CONFIG)
class Link:
    """What lies between node and server, beyond one machine's own sockets.

    Attributes:
        bandwidth: bits a second, in either direction; None: no limit.
        rtt_s: seconds of a round trip of an empty message.
    """

    bandwidth: Annotated[float, Field(gt=0)] | None = None
    rtt_s: Annotated[float, Field(ge=0)] = 0.0

    def seconds(self, amount_bytes: float, rounds: float) -> float:
        """Return the seconds of bytes, sent one after the other, and of round trips."""
        transfer = 0.0 if self.bandwidth is None else 8 * amount_bytes / self.bandwidth
        return transfer + rounds * self.rtt_s


_BANDWIDTHS: Final = {"kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}
_DURATIONS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)([A-Za-z]+)", re.ASCII)
_ADAPTER: Final = TypeAdapter(Machine)


def parse_bandwidth(text: str) -> float:
    """Read bits a second: "100Mbit", "1.5Gbit".

    Raises:
        InputError: it is something else, or zero.
    """
    return _quantity("bandwidth", text, _BANDWIDTHS, "100Mbit", allow_zero=False)


def parse_duration(text: str) -> float:
    """Read seconds: "200us", "1.5ms", "0s".

    Raises:
        InputError: it is something else.
    """
    return _quantity("duration", text, _DURATIONS, "1ms", allow_zero=True)


def _quantity(what: str, text: str, units: dict[str, float], example: str, *, allow_zero: bool) -> float:
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2] not in units:
        raise InputError(f"{what}: expected a number and one of {', '.join(units)}, as in {example}, found {text!r}")
    value = float(found[1]) * units[found[2]]
    if value == 0 and not allow_zero:
        raise InputError(f"{what}: expected more than zero, found {text!r}")
    return value


def machine_file() -> Path:
    """Return where this user's constants are, or would be.

    Raises:
        InputError: this user has no home.
    """
    named, configuration = os.environ.get(VARIABLE), os.environ.get("XDG_CONFIG_HOME")
    if named:
        return Path(named)
    try:
        folder = Path(configuration) if configuration else Path.home() / ".config"
    except RuntimeError as error:
        raise InputError(f"this user has no home for machine.json: name a file with {VARIABLE}") from error
    return folder / "heinfer" / "machine.json"


def shipped_machine() -> Machine:
    """Return the shipped constants, with the cores of this process."""
    return replace(SHIPPED, cores=core_count())


def read_machine(path: Path | None = None) -> tuple[Machine, Path | None]:
    """Return the constants in use and the file that they came from: None for the shipped ones, with our own cores.

    Args:
        path: the file, which must exist; None: `machine_file()`, where there is one.

    Raises:
        InputError: the file is no machine's, or HEINFER_MACHINE names one that is not there.
    """
    if path is None and not os.environ.get(VARIABLE) and not _is_there():
        return shipped_machine(), None
    source = path or machine_file()
    try:
        return _ADAPTER.validate_json(source.read_bytes()), source
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"{source} holds no constants of a machine: {where}: {first['msg']}; run `heinfer bench --calibrate`"
        ) from error
    except OSError as error:
        raise InputError(f"can't read {source}: {error.strerror}; run `heinfer bench --calibrate`") from error


def _is_there() -> bool:
    """Whether this user has constants; where there is no home, or it can't be searched, there are none."""
    try:
        return machine_file().is_file()
    except (InputError, OSError):
        return False


def write_machine(path: Path, machine: Machine) -> None:
    """Write constants as a whole or not at all, making the folder where it is missing.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, _ADAPTER.dump_json(machine, indent=1) + b"\n")
