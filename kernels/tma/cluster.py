"""Sums across the programs of a cluster, through their shared memory: in PTX, as Gluon 3.6.0 has no words for them.

A kernel that uses them is compiled as for one program and launched in clusters.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# The signatures of jitted functions are Triton's: only their constexpr parameters are annotated.

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl


@jit
def cluster_rank():
    return gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@jit
def summed_over_cluster(acc, rank, SPLITS: gl.constexpr, REDUCERS: gl.constexpr, SHARED_BYTES: gl.constexpr):
    """The accumulators [M, N] of a cluster's SPLITS programs, in the order of their ranks, summed: [M, N / REDUCERS].

    Program r < REDUCERS gets the columns from r * N / REDUCERS on; what others get means nothing. acc is of wgmma, each
    warp with 16 rows. The first SHARED_BYTES of every program's shared memory must be free to write: its own barrier
    is at their end. No program may have ended, and nothing may be in flight to shared memory.
    """
    ROWS: gl.constexpr = acc.shape[0]
    GROUPS: gl.constexpr = acc.shape[1] // 8 // REDUCERS  # of 8 columns: 4 numbers a thread
    COLUMNS: gl.constexpr = GROUPS * 8
    THREADS: gl.constexpr = ROWS * 2
    PART_BYTES: gl.constexpr = ROWS * COLUMNS * 4
    ALL: gl.constexpr = acc.type.layout
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ROWS // 16, 1], [16, COLUMNS, 16])
    gl.static_assert(SPLITS * PART_BYTES + 16 <= SHARED_BYTES)
    base = gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)
    bar = base + (SHARED_BYTES - 16)
    gl.thread_barrier()  # every warp has read what it had there
    expect_parts(bar, SPLITS * PART_BYTES)
    meet()
    thread, group = _place(ROWS, acc.shape[1], ALL)
    at = base + ((rank * GROUPS + group % GROUPS) * THREADS + thread) * 16
    send(at, group // GROUPS + thread * 0, bar + (thread + group) * 0, acc)
    if rank < REDUCERS:
        wait_for_parts(bar)
    thread, group = _place(ROWS, COLUMNS, PART)
    at = base + (group * THREADS + thread) * 16
    total = received(at)
    for s in gl.static_range(1, SPLITS):
        total += received(at + s * PART_BYTES)
    gl.thread_barrier()  # the sums may be converted in the memory that these occupy
    return total


@jit
def _place(ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The thread that holds each number of a wgmma accumulator, and which of its groups of 4 it is in."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))[None, :]
    return row // 16 * 32 + row % 8 * 4 + column % 8 // 2, column // 8


@jit
def meet():
    """All threads of the cluster; says nothing about what they wrote, but that their barriers are initialised."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned; // $0",
        "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def expect_parts(bar, num_bytes):
    """A barrier that completes when as many bytes have been sent here."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred is_first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 is_first, thread, 0;
        @is_first mbarrier.init.shared::cta.b64 [$1], 1;
        @is_first fence.mbarrier_init.release.cluster;
        @is_first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,r,r", [bar, num_bytes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def wait_for_parts(bar):
    gl.inline_asm_elementwise(
        """{
        .reg .pred is_done;
        again:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 is_done, [$1], 0;
        @!is_done bra again;
        mov.u32 $0, 0;
        }""",
        "=r,r", [bar], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def send(at, to, bar, values):
    """Four values at a time to program `to`'s shared memory, and their bytes to its barrier."""
    gl.inline_asm_elementwise(
        """{
        .reg .u32 there, theirs;
        mapa.shared::cluster.u32 there, $1, $5;
        mapa.shared::cluster.u32 theirs, $9, $5;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {$13, $14, $15, $16}, [theirs];
        mov.u32 $0, 0;
        }""",
        "=r,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f", [at, to, bar, values], dtype=gl.int8, is_pure=False, pack=4,
    )  # fmt: skip


@jit
def received(at):
    return gl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,r,r,r,r", [at], dtype=gl.float32, is_pure=False, pack=4,
    )  # fmt: skip


@jit
def send_one(at, to, bar, values):
    """Send one value at a time, as `send`."""
    gl.inline_asm_elementwise(
        """{
        .reg .u32 there, theirs;
        mapa.shared::cluster.u32 there, $1, $2;
        mapa.shared::cluster.u32 theirs, $3, $2;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], $4, [theirs];
        mov.u32 $0, 0;
        }""",
        "=r,r,r,r,f", [at, to, bar, values], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def received_one(at):
    """Read one value at a time, as `received`."""
    return gl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [at], dtype=gl.float32, is_pure=False, pack=1)
