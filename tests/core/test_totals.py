"""What the models of a server come to together."""

from reprise.core.backend import Status, total_of
from reprise.core.inspection import OnDisk


def on_disk(nbytes: int, others_nbytes: int, *, trouble: str | None = None) -> Status:
    zeros = dict.fromkeys(("queued_nbytes", "written_nbytes", "read_nbytes", "num_evicted", "num_quarantined"), 0)
    disk = OnDisk(
        budget_nbytes=100,
        nbytes=nbytes,
        others_nbytes=others_nbytes,
        num_files=2,
        num_errors=1,
        trouble=trouble,
        **zeros,
    )
    return Status(disk=disk)


def test_models_in_one_directory() -> None:
    both = total_of([on_disk(10, 25), on_disk(20, 15)]).disk
    assert both is not None and both.trouble is None
    # The third model in there is of another server.
    assert (both.nbytes, both.others_nbytes, both.budget_nbytes) == (30, 5, 100)
    assert (both.num_files, both.num_errors) == (4, 2)
    failed = total_of([Status(), on_disk(10, 0), on_disk(1, 0, trouble="It is full.")]).disk
    assert failed is not None and failed.trouble == "It is full."
