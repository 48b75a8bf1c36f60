"""The untrusted server. It loads neither TenSEAL nor the trusted node, holds no key and sees no scale."""
