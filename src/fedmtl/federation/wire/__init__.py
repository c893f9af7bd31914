"""Jobs and Updates as bytes, and back. Nothing in it can run code; docs/wire.md describes the format."""

from fedmtl.federation.wire.frame import MAX_BYTES, pack, unpack
from fedmtl.federation.wire.messages import decode_job, decode_update, encode_delta, encode_job, encode_update

__all__ = ["MAX_BYTES", "decode_job", "decode_update", "encode_delta", "encode_job", "encode_update", "pack", "unpack"]
