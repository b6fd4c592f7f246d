"""Launch options of the Triton experts: tile sizes by rows an expert, element size and shared memory."""

from dataclasses import dataclass

_SHARED_BYTES_HOPPER = 232_448  # what one program of an sm_90 can have
MOST_COMPARED = 2048  # slots that are sorted by comparing all of them, in one launch
# Average rows of an expert up to which a tile of 16, or of 64, holds most experts' rows.
_FEW_ROWS, _SOME_ROWS = 8, 48
# Of the Gluon products: average rows of an expert up to which a tile has so many. Most experts' rows fit one tile then,
# and a second one's weights come from L2.
_HOPPER_ROWS = ((8, 16), (20, 32), (48, 64))
_MOST_HOPPER_ROWS = 128
# Of mxfp4 weights: slots of a tile of more than so many tokens, if an expert has as many on average. The border is a
# number of tokens, so that a mixture's kernels are known without trying steps of any size.
_MANY_CODES_ROWS, _MOST_OF_128 = 256, 2048
# Average rows of an expert up to which Triton's tiles of mxfp4 codes take less than to write 16-bit weights first: for
# gpt-oss-20b that is 2 GB, 0.5 ms at 4.3 TB/s.
_MOST_CODE_ROWS = 48
_MOST_UNSORTED = 2  # tokens whose slots each read their own expert's weights


@dataclass(frozen=True, slots=True)
class ProductTiles:
    """The tile of one grouped product, block_m rows by block_n columns in steps of block_k, and Triton's options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """The tiles of both products, which share the rows of a tile; gate_up has block_n columns of gate and of up."""

    gate_up: ProductTiles
    down: ProductTiles

    @property
    def block_m(self) -> int:
        return self.gate_up.block_m


# Few rows: weights are what is read, each once where an expert's rows fit one tile. 16 columns of gate and of up are
# 384 programs at 8 experts of width 768, which an H200's 132 multiprocessors hold at once, three each.
_FEW = ExpertTiles(ProductTiles(16, 16, 256, 4, 3), ProductTiles(16, 32, 256, 4, 3))
_SOME = ExpertTiles(ProductTiles(64, 64, 64, 4, 4), ProductTiles(64, 128, 64, 4, 4))
_MANY = ExpertTiles(ProductTiles(128, 128, 64, 8, 3), ProductTiles(128, 256, 64, 8, 3))
_FEW_SMALL = ExpertTiles(ProductTiles(16, 16, 128, 4, 3), ProductTiles(16, 32, 128, 4, 3))  # fits 99 KiB of sm_86
_SOME_SMALL = ExpertTiles(ProductTiles(64, 64, 64, 4, 2), ProductTiles(64, 128, 64, 4, 2))
_FEW_32_BIT = ExpertTiles(ProductTiles(16, 16, 32, 4, 1), ProductTiles(16, 32, 32, 4, 1))  # fp32 FMAs, for tests
_MANY_32_BIT = ExpertTiles(ProductTiles(32, 32, 32, 4, 1), ProductTiles(32, 32, 32, 4, 1))
_FEW_INTERPRETED = ExpertTiles(ProductTiles(16, 16, 32, 4, 1), ProductTiles(16, 32, 32, 4, 1))
_MANY_INTERPRETED = ExpertTiles(ProductTiles(32, 32, 64, 4, 1), ProductTiles(32, 32, 64, 4, 1))


@dataclass(frozen=True, slots=True)
class FewTiles:
    """A product of few tokens with mxfp4 weights: block_n rows of weights by block_k columns at a time."""

    block_n: int
    block_k: int
    num_warps: int = 4


_FEW_GATE_UP, _FEW_DOWN, _FEW_CODES_INTERPRETED = FewTiles(8, 1024), FewTiles(4, 1024), FewTiles(32, 128)
# Slots whose mxfp4 weights a program holds in registers: 2 take 30.2 us, 4 take 31.1 (1 token of gpt-oss-20b, H200).
READ_TOGETHER = 2
_FEW_SLOTS = 2  # of an expert, on average, up to which each slot's own reads of mxfp4 weights cost less than tiles


def few_tiles(shared_bytes: int | None) -> tuple[FewTiles, FewTiles]:
    """Return the tiles of both products; `shared_bytes` is that of `expert_tiles`."""
    return (_FEW_CODES_INTERPRETED,) * 2 if shared_bytes is None else (_FEW_GATE_UP, _FEW_DOWN)


def is_few(num_slots: int, num_experts: int) -> bool:
    """Return whether mxfp4 weights are multiplied slot by slot."""
    return num_slots <= _FEW_SLOTS * num_experts


def expert_tiles(
    num_slots: int, num_experts: int, element_bytes: int, shared_bytes: int | None, *, is_mxfp4: bool = False
) -> ExpertTiles:
    """Tiles for tokens x active experts. `shared_bytes` is the GPU's limit for one program; None in the interpreter.

    Nothing of it depends on which experts the tokens visit: a CUDA graph holds the launches.
    """
    is_few, is_some = (num_slots <= num_experts * rows for rows in (_FEW_ROWS, _SOME_ROWS))
    if shared_bytes is None:
        return _FEW_INTERPRETED if is_few else _MANY_INTERPRETED
    if element_bytes == 4:
        return _FEW_32_BIT if is_few else _MANY_32_BIT
    if shared_bytes < _SHARED_BYTES_HOPPER:
        return _FEW_SMALL if is_few else _SOME_SMALL
    # What codes take to become numbers bounds mxfp4, of any height of tiles: those of 16 rows took twice as long.
    return _FEW if is_few and not is_mxfp4 else _SOME if is_some else _MANY


def hopper_rows(num_tokens: int, num_active: int, num_experts: int) -> int:
    """Slots of a tile of the Gluon products; 1 where a tile is one slot's, and none are sorted."""
    if num_tokens <= _MOST_UNSORTED:
        return 1
    average = num_tokens * num_active / num_experts
    return next((rows for most, rows in _HOPPER_ROWS if average <= most), _MOST_HOPPER_ROWS)


def codes_rows(num_tokens: int, num_active: int, num_experts: int) -> int:
    """`hopper_rows` of mxfp4 weights: also 256, where an expert has more rows than that on average."""
    is_many = num_tokens > _MOST_OF_128 and _MOST_OF_128 * num_active >= _MANY_CODES_ROWS * num_experts
    return _MANY_CODES_ROWS if is_many else hopper_rows(num_tokens, num_active, num_experts)


def takes_codes(num_slots: int, num_experts: int) -> bool:
    """Return whether mxfp4 weights are multiplied as codes, in place of as 16-bit numbers that are written first."""
    return num_slots <= _MOST_CODE_ROWS * num_experts


def most_tiles(num_slots: int, num_experts: int, block_m: int) -> int:
    """The largest number of tiles that any assignment of slots to experts makes."""
    return num_slots // block_m + min(num_experts, num_slots)


def launch_variant(
    num_tokens: int, num_experts: int, num_active: int, element_bytes: int, shared_bytes: int | None
) -> tuple[object, ...]:
    """Return what depends on the number of tokens in launches: numbers with equal variants run the same kernels."""
    num_slots = num_tokens * num_active
    tiles = expert_tiles(num_slots, num_experts, element_bytes, shared_bytes)
    return (
        tiles,
        num_slots <= MOST_COMPARED,
        codes_rows(num_tokens, num_active, num_experts),
        is_few(num_slots, num_experts),
    )


def token_counts(num_experts: int, num_active: int, element_bytes: int, shared_bytes: int | None) -> list[int]:
    """Return one number of tokens for each variant of the launches: what runs for these is all that ever runs."""
    first: dict[tuple[object, ...], int] = {}
    most_slots = max(num_experts * _SOME_ROWS, MOST_COMPARED)
    most = max(most_slots // num_active, _MOST_OF_128)  # beyond these nothing changes
    for num_tokens in range(1, most + 2):
        first.setdefault(launch_variant(num_tokens, num_experts, num_active, element_bytes, shared_bytes), num_tokens)
    return sorted(first.values())


def padded(size: int) -> int:
    """The power of two a vector is padded to, at least the 16 of an MMA instruction."""
    return max(16, 1 << (size - 1).bit_length())
