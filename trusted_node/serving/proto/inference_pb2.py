"""The messages of inference.proto, in a descriptor pool of their own.

    inference_pb2.ModelInferRequest(model_name="mnist")        # a class, like one of a generated module

Clients of the protocol bring descriptors of the same full names, in files of other content, and protobuf's default pool
takes one of the two only: whichever module comes second fails to import. Here both live in one process. So this module
is not generated, as its name would say: it reads the compiled descriptors, and its name is where a type checker finds
inference_pb2.pyi. `make stubs` makes both files from inference.proto.
"""

from __future__ import annotations

from importlib.resources import files

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_pool = DescriptorPool()
for _file in FileDescriptorSet.FromString(files(__package__).joinpath("inference.pb").read_bytes()).file:
    _pool.Add(_file)
DESCRIPTOR = _pool.FindFileByName("inference.proto")
globals().update({name: GetMessageClass(message) for name, message in DESCRIPTOR.message_types_by_name.items()})
globals().update({v.name: v.number for enum in DESCRIPTOR.enum_types_by_name.values() for v in enum.values})
