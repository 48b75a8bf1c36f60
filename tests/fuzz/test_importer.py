"""Models that are damaged, inconsistent or hostile: the partitioner takes them or refuses them, and nothing else.

The partitioner runs in a process of its own, since onnx and onnxruntime are C++: a crash there is a finding as well.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heinfer.errors import HeinferError
from heinfer.ring import RingParameters
from partitioner.pipeline import partition_in_memory
from tests.fuzz.campaign import SECONDS, campaign, run_for
from tests.fuzz.child import Child
from tests.fuzz.models import EDITS, seed_models
from tests.fuzz.mutations import mutated

EXPECTED = (HeinferError,)
SEEDS = seed_models()


def partition_file(path: Path) -> None:
    """Run all of the partitioner but writing; the target of the child."""
    partition_in_memory(path, RingParameters.default())


@st.composite
def edited_models(draw: st.DrawFn) -> onnx.ModelProto:
    """Return a valid model with a few edits of its meaning."""
    model = onnx.ModelProto()
    model.CopyFrom(SEEDS[draw(st.sampled_from(sorted(SEEDS)))])
    for _ in range(draw(st.integers(1, 3))):
        edit = draw(st.sampled_from(EDITS))
        if not model.graph.node or not model.graph.initializer:
            break
        edit(model, lambda items: draw(st.sampled_from(list(items))))
    return model


@st.composite
def examples(draw: st.DrawFn) -> bytes:
    """Return the bytes of an edited model, or damaged bytes of a valid one."""
    if draw(st.integers(0, 3)):
        return draw(edited_models()).SerializeToString()
    return draw(mutated(SEEDS[draw(st.sampled_from(sorted(SEEDS)))].SerializeToString()))


@pytest.mark.slow
@pytest.mark.fuzz
def test_any_model_is_partitioned_or_refused() -> None:
    outcomes: Counter[str] = Counter()
    with Child(f"{__name__}:partition_file") as child:
        for model in SEEDS.values():
            assert child.check(model.SerializeToString()) == "accepted"

        @campaign(20)
        @given(examples())
        def check(example: bytes) -> None:
            outcomes[child.check(example)] += 1

        run_for(SECONDS, check)
    print(dict(outcomes))
    assert outcomes["accepted"] > 0
    assert outcomes["UnsupportedModelError"] > 0
