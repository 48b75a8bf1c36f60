"""Generated protobuf stubs; the source is heinfer.proto, which says how to make them again."""
