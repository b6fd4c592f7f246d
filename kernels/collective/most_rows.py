"""The border between few rows and many. Imports no torch."""


def most_rows(world: int) -> int:
    """Rows of a call that travel by writes into inboxes; more go by NCCL.

    512 rows of 4096 bf16 then take 20 us, with the norm, and NCCL's sum and the norm 35; of 8192 35 and 52 (two H200,
    CUDA graphs). Every part goes to every rank: of four or eight ranks as many rows take three or seven times the bytes
    that they take of two, where NCCL's take 1.5 or 1.75 times (not measured).
    """
    return 512 if world == 2 else 128
