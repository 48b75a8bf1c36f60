"""Our descriptors beside those of a client, and tensors of gRPC messages: what is read, and what is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from tritonclient.grpc import model_config_pb2, service_pb2

from heinfer.errors import InputError
from tests.interfaces.fakes import MIXED, digits_model, mixed_model
from trusted_node.serving import grpc_messages as messages
from trusted_node.serving.datatypes import DATATYPES, datatype_of, dtype_of
from trusted_node.serving.interface import Channel, Query
from trusted_node.serving.proto import inference_pb2 as pb

PROTO = Path(pb.__file__).parent
THEIRS = {
    **model_config_pb2.DESCRIPTOR.message_types_by_name,
    **service_pb2.DESCRIPTOR.message_types_by_name,
}
OURS = pb.DESCRIPTOR.message_types_by_name
DIGITS = digits_model()
MIXED_MODEL = mixed_model()


def signature(field: FieldDescriptor) -> tuple[object, ...]:
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof
    return (
        field.name,
        field.number,
        field.type,
        field.is_repeated,
        None if kind is None else kind.full_name,
        None if oneof is None else oneof.name,
    )


def compare(ours: Descriptor, theirs: Descriptor) -> int:
    """Compare all fields of a message and of those inside it; return how many fields they were."""
    assert ours.full_name == theirs.full_name
    for field in ours.fields:
        assert signature(field) == signature(theirs.fields_by_name[field.name])
    inside = sum(compare(nested, theirs.nested_types_by_name[nested.name]) for nested in ours.nested_types)
    return len(ours.fields) + inside


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_field_is_the_one_that_clients_know(name: str) -> None:
    compare(OURS[name], THEIRS[name])


@pytest.mark.parametrize("name", sorted(n for n in OURS if not n.startswith("Model") or "Request" in n or "Infer" in n))
def test_messages_of_requests_and_results_are_complete(name: str) -> None:
    # In InferStatistics two fields are left out that are about a cache of answers.
    left_out = {"InferStatistics": {"cache_hit", "cache_miss"}}.get(name, set())
    assert {f.name for f in THEIRS[name].fields} - {f.name for f in OURS[name].fields} == left_out


def test_comparing_sees_a_different_field() -> None:
    with pytest.raises(AssertionError):
        compare(OURS["ServerLiveResponse"], THEIRS["ServerReadyResponse"])
    ours, theirs = OURS["ModelReadyRequest"].fields_by_name["name"], THEIRS["ModelReadyRequest"]
    assert signature(ours) != signature(theirs.fields_by_name["version"])


def test_methods_are_those_that_clients_call() -> None:
    ours = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert ours.full_name == theirs.full_name
    for method in ours.methods:
        other = theirs.methods_by_name[method.name]
        assert method.input_type.full_name == other.input_type.full_name
        assert method.output_type.full_name == other.output_type.full_name
        assert (method.client_streaming, method.server_streaming) == (other.client_streaming, other.server_streaming)


def test_values_of_datatypes_are_those_that_clients_know() -> None:
    assert dict(model_config_pb2.DataType.items()) == {
        value.name: value.number for value in pb.DESCRIPTOR.enum_types_by_name["DataType"].values
    }
    assert set(DATATYPES) < {name.removeprefix("TYPE_") for name in dict(model_config_pb2.DataType.items())}


def compile_source(*options: str) -> None:
    """Run protoc, in a process of its own: its libprotobuf and TenSEAL's in one process end in an abort."""
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", *options, "inference.proto"], check=True)


def test_what_is_compiled_is_what_the_source_says(tmp_path: Path) -> None:
    target = tmp_path / "inference.pb"
    compile_source(f"--descriptor_set_out={target}", f"--pyi_out={tmp_path}")
    compiled = FileDescriptorSet.FromString((PROTO / "inference.pb").read_bytes())
    assert compiled == FileDescriptorSet.FromString(target.read_bytes()), "run `make stubs`"
    stubs = "inference_pb2.pyi"
    assert (PROTO / stubs).read_text() == (tmp_path / stubs).read_text(), "run `make stubs`"


def digit_request(x: np.ndarray | None = None) -> pb.ModelInferRequest:
    x = np.linspace(0, 1, 28 * 28, dtype="<f4").reshape(1, 1, 28, 28) if x is None else x
    request = pb.ModelInferRequest(model_name="digits")
    request.inputs.add(name="x", datatype="FP32", shape=x.shape)
    request.raw_input_contents.append(x.tobytes())
    return request


def mixed_request(values: dict[str, np.ndarray]) -> pb.ModelInferRequest:
    """All in typed contents; FP16 has none."""
    request = pb.ModelInferRequest(model_name="mixed")
    for name, array in values.items():
        datatype = datatype_of(array.dtype.name)
        tensor = request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        getattr(tensor.contents, messages._CONTENTS[datatype]).extend(array.reshape(-1).tolist())
    return request


def extremes(dtype: str) -> np.ndarray:
    """Six values of a type, its ends among them, shape (1, 2, 3)."""
    if dtype == "bool":
        return np.array([[[True, False, True], [False, False, True]]])
    info = np.finfo(dtype) if np.dtype(dtype).kind == "f" else np.iinfo(dtype)
    return np.array([info.min, info.max, 0, 1, 2, 3], dtype).reshape(1, 2, 3)


def test_typed_contents_are_read_exactly_in_every_type() -> None:
    values = {name: extremes(dtype) for name, dtype in MIXED.items() if dtype != "float16"}
    read = messages.read_inputs(MIXED_MODEL, mixed_request(values))
    assert set(read) == set(values)
    for name, array in values.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_raw_contents_are_read_exactly_in_every_type() -> None:
    values = {name: extremes(dtype) for name, dtype in MIXED.items()}
    request = pb.ModelInferRequest(model_name="mixed")
    for name, array in values.items():
        request.inputs.add(name=name, datatype=datatype_of(array.dtype.name), shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    read = messages.read_inputs(MIXED_MODEL, request)
    for name, array in values.items():
        assert read[name].dtype == array.dtype
        np.testing.assert_array_equal(read[name], array)


def test_results_are_written_in_every_type_and_only_as_asked() -> None:
    outputs = {f"o{name}": extremes(dtype) for name, dtype in MIXED.items()}
    request = pb.ModelInferRequest(model_name="mixed", id="q-1")
    request.outputs.add(name="of16")
    request.outputs.add(name="ob")
    asked = messages.Asked(
        request, MIXED_MODEL, messages.wanted_outputs(MIXED_MODEL, request), Query({}, Channel.GRPC, "q-1")
    )
    response = messages.write_result(asked, outputs)
    assert (response.id, response.model_name, response.model_version) == ("q-1", "mixed", "1")
    assert [(o.name, o.datatype, list(o.shape)) for o in response.outputs] == [
        ("of16", "FP16", [1, 2, 3]),
        ("ob", "BOOL", [1, 2, 3]),
    ]
    assert list(response.raw_output_contents) == [outputs["of16"].tobytes(), outputs["ob"].tobytes()]
    assert messages.wanted_outputs(MIXED_MODEL, pb.ModelInferRequest()) == tuple(f"o{name}" for name in MIXED)


def test_a_result_that_is_not_contiguous_is_written_row_major() -> None:
    values = np.arange(20, dtype=np.float32).reshape(10, 2).T
    asked = messages.Asked(pb.ModelInferRequest(), DIGITS, ("y",), Query({}, Channel.GRPC, "1"))
    (raw,) = messages.write_result(asked, {"y": values}).raw_output_contents
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4").reshape(2, 10), values)


def refuse(request: pb.ModelInferRequest, model: object = DIGITS) -> str:
    with pytest.raises(InputError) as caught:
        _read(request, model)
    return str(caught.value)


def _read(request: pb.ModelInferRequest, model: object) -> None:
    messages.wanted_outputs(model, request)
    messages.read_inputs(model, request)


def test_tensors_that_do_not_fit_are_refused_with_what_was_expected() -> None:
    request = digit_request()
    request.inputs[0].name = "z"
    assert refuse(request) == "input 'z' is unknown: expected ['x'], each once"
    request = digit_request()
    request.inputs[0].datatype = "FP64"
    assert refuse(request) == "input 'x': expected datatype FP32, found FP64"
    request.inputs[0].datatype = "BYTES"
    assert refuse(request).startswith("datatype 'BYTES' is not supported: expected one of BOOL, ")
    request.inputs[0].datatype = "FLOAT"
    assert refuse(request).startswith("datatype 'FLOAT' is unknown: ")
    request = digit_request()
    request.inputs.append(request.inputs[0])
    request.raw_input_contents.append(request.raw_input_contents[0])
    assert refuse(request) == "input 'x' is there twice: expected ['x'], each once"


@pytest.mark.parametrize("shape", [(), (1,), (1, 28, 28), (1, 1, 28, 27), (0, 1, 28, 28), (-1, 1, 28, 28)])
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    request = digit_request()
    request.inputs[0].shape[:] = shape
    assert refuse(request) == f"input 'x': expected shape ('samples', 1, 28, 28), found {shape}"


def test_a_shape_of_more_samples_than_one_request_may_have_is_refused_unread() -> None:
    request = digit_request()
    request.inputs[0].shape[0] = 2**62
    started = time.perf_counter()
    assert refuse(request) == f"input 'x': a request may have 64 samples, found {2**62}; send several requests"
    assert time.perf_counter() - started < 1


def test_bytes_that_are_not_as_many_as_the_shape_says_are_refused() -> None:
    request = digit_request()
    request.raw_input_contents[0] += b"\0"
    assert refuse(request) == "input 'x': FP32 of shape (1, 1, 28, 28) has 3136 bytes, found 3137"
    request.raw_input_contents.append(b"")
    assert refuse(request).startswith("raw_input_contents: expected bytes of all 1 inputs, found those of 2; ")


def test_values_both_as_bytes_and_typed_are_refused() -> None:
    request = digit_request()
    request.inputs[0].contents.fp32_contents.append(1)
    assert "send one of the two" in refuse(request)


def test_typed_values_in_the_wrong_field_or_number_are_refused() -> None:
    values = {"u8": np.zeros((1, 2, 3), np.uint8)}
    request = mixed_request(values)
    request.inputs[0].contents.fp64_contents.append(1)
    assert refuse(request, MIXED_MODEL) == "input 'u8': UINT8 belongs into uint_contents alone, found " + ", ".join(
        ["uint_contents", "fp64_contents"]
    )
    request = mixed_request(values)
    request.inputs[0].contents.uint_contents.pop()
    assert refuse(request, MIXED_MODEL) == "input 'u8': shape (1, 2, 3) has 6 values, found 5"
    request = mixed_request(values)
    request.inputs[0].contents.Clear()
    assert refuse(request, MIXED_MODEL) == "input 'u8': shape (1, 2, 3) has 6 values, found 0"


@pytest.mark.parametrize(("name", "value"), [("u8", 256), ("u16", 2**16), ("i8", -129), ("i16", 2**15)])
def test_typed_values_outside_their_type_are_refused_unquoted(name: str, value: int) -> None:
    request = mixed_request({name: np.zeros((1, 2, 3), MIXED[name])})
    contents = request.inputs[0].contents
    (contents.uint_contents if value > 0 and name[0] == "u" else contents.int_contents)[3] = value
    said = refuse(request, MIXED_MODEL)
    assert said.startswith(f"input '{name}': a value is outside the range of ")
    assert str(value) not in said


def test_half_floats_have_no_typed_contents() -> None:
    request = pb.ModelInferRequest()
    request.inputs.add(name="f16", datatype="FP16", shape=(1, 2, 3)).contents.fp32_contents.extend([0] * 6)
    assert refuse(request, MIXED_MODEL) == "input 'f16': FP16 has no typed contents; send it in raw_input_contents"


def test_a_raw_truth_value_of_two_is_refused() -> None:
    request = pb.ModelInferRequest(raw_input_contents=[b"\0\1\0\1\2\0"])
    request.inputs.add(name="b", datatype="BOOL", shape=(1, 2, 3))
    assert refuse(request, MIXED_MODEL) == "input 'b': a BOOL is a byte 0 or 1, found others"


def test_extensions_that_would_change_the_answer_are_refused() -> None:
    request = digit_request()
    request.parameters["sequence_id"].int64_param = 3
    assert refuse(request).startswith("sequences are not served: ")
    request = digit_request()
    request.inputs[0].parameters["shared_memory_region"].string_param = "r"
    assert refuse(request).startswith("input 'x': shared memory is not served; ")
    request = digit_request()
    request.outputs.add(name="y").parameters["classification"].int64_param = 3
    assert refuse(request).startswith("output 'y': classification is not served; ")
    request.outputs[0].parameters.clear()
    request.outputs[0].parameters["shared_memory_region"].string_param = "r"
    assert refuse(request).startswith("output 'y': shared memory is not served; ")
    request = digit_request()
    request.outputs.add(name="z")
    assert refuse(request) == "output 'z' is unknown: expected of ['y'], each once"
    request.outputs[0].name = "y"
    request.outputs.add(name="y")
    assert refuse(request) == "output 'y' is asked for twice: expected of ['y'], each once"


def test_timeouts_are_microseconds() -> None:
    request = digit_request()
    assert messages.read_timeout(request) == float("inf")
    request.parameters["timeout"].int64_param = 2_500_000
    assert messages.read_timeout(request) == 2.5
    request.parameters["timeout"].uint64_param = 1
    assert messages.read_timeout(request) == 1e-6
    request.parameters["timeout"].int64_param = 0
    assert messages.read_timeout(request) == float("inf")


@pytest.mark.parametrize("timeout", [{"int64_param": -1}, {"string_param": "1"}, {"double_param": 1.0}, {}])
def test_what_is_no_timeout_is_refused(timeout: dict[str, object]) -> None:
    request = digit_request()
    request.parameters["timeout"].CopyFrom(pb.InferParameter(**timeout))
    with pytest.raises(InputError, match="expected microseconds"):
        messages.read_timeout(request)


def test_ids_are_the_clients_where_they_are_fit_for_a_log() -> None:
    request = digit_request()
    request.id = "clinic-17.a_B"
    assert messages.request_id(request) == "clinic-17.a_B"
    for unfit in ("", "a b", "a\nb", "é", "x" * 65):
        request.id = unfit
        made = messages.request_id(request)
        assert made != unfit
        assert len(made) == 16
        assert made != messages.request_id(request)


def test_types_have_one_name_each() -> None:
    for name, dtype in DATATYPES.items():
        assert dtype_of(name) == dtype
        assert datatype_of(dtype.name) == name
    with pytest.raises(InputError, match="complex64"):
        datatype_of("complex64")
