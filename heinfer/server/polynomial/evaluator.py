"""Evaluate a deep block: its steps in order, each cut into units, values in files.

inputs, keys (files) --> step: units on workers --> value (file) --> ... --> outputs (files)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heinfer.plan.deep import DeepBlock
from heinfer.server.polynomial.files import Store
from heinfer.server.polynomial.processes import Gone
from heinfer.server.polynomial.resources import DeepResources
from heinfer.server.polynomial.units import Schedule, input_shapes, key_shape
from heinfer.server.polynomial.worker import Job

Residues = NDArray[np.int64]


def nobody_goes() -> bool:
    """Return False: who waits for an answer does so to the end."""
    return False


class DeepEvaluator:
    """Evaluates one deep block.

    Args:
        block: the block.
        arrays: its layers' arrays.
        resources: that it shares with others; its own where None.

    Attributes:
        scratch_bytes: that a request takes on the disk, exactly, at its peak.

    Raises:
        PlanError: arrays don't fit.
    """

    def __init__(
        self, block: DeepBlock, arrays: Mapping[str, NDArray[Any]], resources: DeepResources | None = None
    ) -> None:
        block.check_arrays(arrays)
        self.block = block
        self.resources = resources or DeepResources()
        self._arrays = {name: np.asarray(array) for name, array in block.own_arrays(arrays).items()}
        self._schedule = Schedule(block, self._arrays, self.resources.processes.count)
        self.scratch_bytes = self._schedule.peak_bytes

    def stores(self, folder: Path) -> tuple[Store, list[Store]]:
        """Return the files of keys and inputs in a request's folder; they are not made yet."""
        inputs = [Store(folder / f"input-{n}", shape) for n, shape in enumerate(input_shapes(self.block))]
        return Store(folder / "keys", key_shape(self.block)), inputs

    def evaluate(self, inputs: Residues, keys: Residues) -> Residues:
        """Evaluate the block.

        Args:
            inputs: int64, shape (elements of all inputs, 2, primes, N), transformed; may be mapped from a file.
            keys: for relinearisation: residues, shape (primes, 2, primes and P, N), transformed.

        Returns:
            Likewise, of all outputs, each with the primes that the fewest of them have.

        Raises:
            CiphertextError: inputs or keys are none of the chain.
        """
        with self.resources.space.folder(self.scratch_bytes) as folder:
            held, stores = self.stores(folder)
            held = Store(held.path, keys.shape)  # which is checked where they are loaded
            held.create()[...] = keys
            first = 0
            for store in stores:
                store.create()[...] = inputs[first : first + store.shape[0]]
                first += store.shape[0]
            results = self.evaluate_stored(folder, stores, held)
            return np.concatenate([s.open()[:, :, : self.block.result_primes] for s in results])

    def evaluate_stored(
        self, folder: Path, inputs: Sequence[Store], keys: Store, gone: Gone = nobody_goes
    ) -> list[Store]:
        """Evaluate the block on what lies in files, when it is our turn.

        Args:
            folder: for what is made on the way; the caller removes it.
            inputs: of every input; files that nothing reads any more are removed on the way.
            keys: for relinearisation.
            gone: whether nobody waits for the result any more; looked at every now and then.

        Returns:
            Of every output, with `result_primes` primes or more.

        Raises:
            CiphertextError: inputs or keys are none of the chain.
            OSError: there is no room for what is made on the way.
            RemoteProtocolError: nobody waits for the result any more.
            HeinferError: it was stopped, or a process died.
        """
        stores = dict(enumerate(inputs))
        with self.resources.processes.request(Job(self.block, self._arrays, keys), gone) as run:
            for step in self._schedule.steps:
                value = len(inputs) + step.layer
                target = Store(folder / f"value-{value}", step.shape)
                target.create()
                sources = [stores[s] for s in self.block.layers[step.first].sources]
                run(self._schedule.units(step), sources, target)
                stores[value] = target
                for unneeded in step.unneeded & stores.keys():
                    stores.pop(unneeded).path.unlink()
        return [stores[r] for r in self.block.results]
