"""onnxruntime in the clear: the floor below every encrypted figure. In heinfer's own environment. Licence: MIT.

Its "server" is the whole of it, and nothing is protected.
"""

from __future__ import annotations

import time

import numpy as np
import onnxruntime
from measuring import Measured, Task, core_count, main, repeat_queries

#: A throughput is measured on so many samples at most, and for so many seconds.
BATCH, THROUGHPUT_S = 512, 2.0


def measure(task: Task) -> Measured:
    """Measure single queries, then whole batches."""
    started = time.perf_counter()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = core_count()
    session = onnxruntime.InferenceSession(str(task.model), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    prepared_s = time.perf_counter() - started

    def query(sample: np.ndarray) -> np.ndarray:
        return session.run(None, {name: sample})[0]

    query(task.x[:1])  # allocates
    outputs, seconds = repeat_queries(task, query)
    batch = task.x[:BATCH]
    runs, started = 0, time.perf_counter()
    while runs == 0 or time.perf_counter() - started < min(THROUGHPUT_S, task.budget_s):
        query(batch)
        runs += 1
    throughput = runs * len(batch) / (time.perf_counter() - started)
    return Measured(
        outputs,
        seconds,
        preparation_s=prepared_s,
        server_s=seconds,
        throughput_per_s=throughput,
        batch=len(batch),
        note="in the clear: the server sees everything",
        parameters={"threads": core_count()},
    )


if __name__ == "__main__":
    main("onnxruntime", ("onnxruntime",), measure)
