"""A model that may take only a share of the directory, as a draft model does."""

from pathlib import Path

from tests.disk.chains import find, opened, position, put_path, record_files


def test_a_model_s_share_bounds_what_is_its_own(tmp_path: Path) -> None:
    """Where there is more room, too; what it evicts for that is its own."""
    with opened(tmp_path, fingerprint="other", max_bytes=50_000) as other:
        put_path(other, list(range(20)))
    files = record_files(tmp_path)
    with opened(tmp_path, max_bytes=50_000, max_own_bytes=3_000) as cache:
        for k in range(10):
            put_path(cache, [k, k, k])
            assert cache.stats().nbytes <= 3_000
        assert cache.stats().num_files > 1 and position(find(cache, [9, 9, 9])) == 3
        assert all(path.exists() for path in files)
        cache.check()
    with opened(tmp_path, max_bytes=50_000, max_own_bytes=1_500) as cache:
        assert 0 < cache.stats().nbytes <= 1_500
        cache.check()
