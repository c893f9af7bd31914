"""Sizes of what is shipped."""

import zlib

from fedmtl.compress.measure.costs import compressed_bytes, disk_bytes


def test_a_folder_is_all_of_its_files_and_compresses_as_one_stream(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "b").write_bytes(bytes(range(256)))
    assert disk_bytes(tmp_path) == 3_000_256
    assert compressed_bytes(tmp_path) == len(zlib.compress(b"x" * 3_000_000 + bytes(range(256)), 6))
    assert disk_bytes(tmp_path / "a") == 3_000_000
    assert compressed_bytes(tmp_path / "a") == len(zlib.compress(b"x" * 3_000_000, 6))
