/* The C interface of tpkernels' CUDA kernels: no torch, no C++ types, no CUDA headers needed by callers.
 *
 * Every function that works returns 0; a cudaError_t is positive, TPK_INVALID negative, and tpk_error_string names
 * either (for TPK_INVALID the argument and its value, of this thread's last call).  `stream` is a cudaStream_t.
 * Functions with a stream only enqueue; all can be captured in a CUDA graph, unless said otherwise.  Calls of one
 * group must come from one thread at a time, on one stream or on streams that are ordered after each other.
 *
 * The protocol (who writes which word, and why slots may be reused) is in csrc/cuda/README.md.
 */
#pragma once

#include <stdint.h>

#define TPK_CUDA_ABI 7
#define TPK_MAX_RANKS 64
#define TPK_MAX_CHUNKS 64
#define TPK_SLOTS 2
#define TPK_PAD_BYTES 33408       /* a signal pad: symmetric memory, zeroed before any rank's first call */
#define TPK_STATE_BYTES 32        /* of this rank's device memory, zeroed */
#define TPK_STATE_RAISED_OFFSET 0 /* uint32: what a raised flag of the current call holds, for kernels of others */
#define TPK_STATE_FAILED_OFFSET 8 /* uint32: not 0 once a wait has failed; whoever else waits should look at it */

#define TPK_FLAG_RAISED 0x40000000 /* what tpk_begin writes there; the flags that it is given hold 0 then */

#define TPK_INVALID (-1)

enum tpk_dtype { TPK_F32 = 0, TPK_BF16 = 1, TPK_F16 = 2 };
/* TIMEOUT: a wait lasted too long; POISONED: a peer has failed; MISMATCH: a peer is in another call; ALARM: another
 * kernel of this rank has given up, and its own record says why. */
enum tpk_failure_kind { TPK_TIMEOUT = 1, TPK_POISONED = 2, TPK_MISMATCH = 3, TPK_ALARM = 4 };
/* How a local flag is raised on a stream (a signal to a peer is always a kernel: that of a failed rank stays silent).
 * KERNEL needs room for one warp on an SM, so whoever spins must leave it; COPY copies the word with the copy engine
 * (whether small copies stay off the SMs is the driver's choice, and their order with the data rests on that of the
 * stream alone); WRITE_VALUE needs neither, and CUDA documents a fence before it (cuStreamWriteValue32).  Its value is
 * always the same, so that a captured graph may repeat it. */
enum tpk_raise { TPK_RAISE_KERNEL = 0, TPK_RAISE_COPY = 1, TPK_RAISE_WRITE_VALUE = 2 };

#ifdef __cplusplus
extern "C" {
#endif

/* The first failure of this rank, in host memory.  All fields are there once `state` is 1. */
typedef struct tpk_failure {
    uint32_t state;
    int32_t kind;
    int32_t rank;  /* who reports */
    int32_t op;    /* as given to the call that waited */
    int32_t peer;  /* who is late, disagrees, or (POISONED) failed first */
    int32_t chunk; /* -1: the peer has not begun the call */
    uint32_t epoch;
    uint32_t expected;
    uint32_t got;
    uint32_t fingerprint; /* of the peer, for MISMATCH */
    uint64_t waited_ns;
    uint32_t call; /* that this rank had begun last: who waits for a local flag may not know its number */
    uint32_t unused;
} tpk_failure;

/* One rank's end of a group.  `pads` is a host array of device pointers; all else is plain. */
typedef struct tpk_group {
    int32_t rank;
    int32_t world_size;
    void* const* pads;
    void* state;
    tpk_failure* failure; /* of tpk_failure_create, as the device addresses it */
    uint64_t* alarm;      /* NULL, or what this rank's other kernels set and look at when a wait fails: 0 is no alarm */
    uint64_t timeout_ns;
    /* Blocks that a kernel of this rank may wait with, the same on every rank: so many SMs it may occupy, and what it
     * waits for must find room on the rest (tpkernels/backends/symmetric/residency.py). */
    int32_t max_blocks;
} tpk_group;

/* A copy of `rows` rows of `row_bytes` bytes, what it waits for, and whom it tells.  Sets of ranks have a bit per rank;
 * the flag of rank r is flags[r * flag_stride]. */
typedef struct tpk_chunk {
    int64_t target, source;           /* addresses, or places in tensors that differ from call to call: */
    int32_t target_base, source_base; /* 0, or 1 + the number of the base that is added (tpk_call_run) */
    int64_t rows, row_bytes, target_stride_bytes, source_stride_bytes;
    uint64_t wait_peers;   /* whose signal `chunk` must be there first */
    uint64_t wait_ranks;   /* whose local flags must be raised first */
    uint64_t raise_ranks;  /* whose local flags are raised afterwards */
    uint64_t signal_peers; /* who gets signal `chunk` afterwards */
    uint32_t* flags;
    int32_t flag_stride;
    int32_t chunk;
    int32_t lane; /* the side stream, or -1: the stream of the call; there are only copies */
    int32_t unused;
} tpk_chunk;

typedef struct tpk_pipeline tpk_pipeline;

int tpk_cuda_abi(void);
const char* tpk_error_string(int error);
int tpk_device_count(int* count);
int tpk_can_access_peer(int device, int peer_device, int* can);
/* Whether the two are joined by a link that carries atomics, as NVLink does and PCIe does not. */
int tpk_has_peer_atomics(int device, int peer_device, int* has);
/* Whether WRITE_VALUE can be used on the current device, which is tried.  Not in capture; waits for that trial. */
int tpk_has_write_value(int* has);

/* Loads all kernels onto the current device.  Not in capture; before the first call.  Otherwise the first launch of
 * each would load it, which may have to wait for running kernels, and those for the signal of the one that is not
 * loaded. */
int tpk_load_kernels(void);

/* Not in capture.  The record lives until destroyed; `device` is what goes into tpk_group. */
int tpk_failure_create(tpk_failure** host, tpk_failure** device);
int tpk_failure_destroy(tpk_failure* host);

/* Begins call number epoch + 1: tells every rank, and waits until all of them are done with `slot` of earlier calls.
 * `fingerprint` says what the call is; ranks that disagree fail.  Lowers the first `num_flags` of `flags` (or NULL, 0),
 * so that a replayed call raises them anew, always to TPK_FLAG_RAISED. */
int tpk_begin(const tpk_group* group, int32_t op, int32_t slot, uint32_t fingerprint, uint32_t* flags,
              int32_t num_flags, void* stream);
/* Ends a call whose slots were read by copies (join the pipeline before): fails if a peer has failed, because what it
 * enqueued behind its failure may have overwritten what was read.  tpk_reduce and tpk_all_reduce do so themselves. */
int tpk_end(const tpk_group* group, int32_t op, void* stream);
/* A call by itself: returns (on the stream) when every rank is in it. */
int tpk_barrier(const tpk_group* group, int32_t op, uint32_t fingerprint, void* stream);
/* Signal `chunk` to the ranks in `peers` (bit per rank): what the stream has done so far is done. */
int tpk_signal(const tpk_group* group, int32_t chunk, uint64_t peers, void* stream);
/* Wait for signal `chunk` of the ranks in `peers`. */
int tpk_wait(const tpk_group* group, int32_t op, int32_t chunk, uint64_t peers, void* stream);
/* Raise a local flag; wait until one is raised. */
int tpk_raise_flag(const tpk_group* group, uint32_t* flag, void* stream);
int tpk_wait_flag(const tpk_group* group, int32_t op, int32_t chunk, const uint32_t* flag, void* stream);

/* Side streams of the current device, for copies.  Create and destroy: not in capture. */
int tpk_pipeline_create(int32_t streams, tpk_pipeline** pipeline);
int tpk_pipeline_destroy(tpk_pipeline* pipeline);
/* Side stream `lane`, for what else is to run there; it lives as long as the pipeline. */
int tpk_pipeline_stream(const tpk_pipeline* pipeline, int32_t lane, void** stream);
/* What is enqueued on side streams waits for what `stream` holds now / `stream` waits for all of it. */
int tpk_pipeline_fork(tpk_pipeline* pipeline, void* stream);
int tpk_pipeline_join(tpk_pipeline* pipeline, void* stream);

/* A call whose data the copy engines move, prepared: only `fingerprint` differs between calls of a kind in one slot. */
typedef struct tpk_call {
    const tpk_group* group;
    tpk_pipeline* pipeline;
    const tpk_chunk* chunks;
    int64_t num_chunks;
    uint32_t* flags; /* those that are lowered */
    int32_t num_flags;
    int32_t op, slot;
    uint32_t fingerprint;
    int32_t how;           /* flags are raised: enum tpk_raise */
    uint32_t raised_value; /* that WRITE_VALUE writes: TPK_FLAG_RAISED, unless others than tpk_begin begin the calls */
} tpk_call;
/* BEGIN: tpk_begin, and the side streams follow.  MOVE: all chunks, in order.  JOIN: the stream waits for the side
 * streams.  END: tpk_end. */
enum tpk_steps { TPK_BEGIN = 1, TPK_MOVE = 2, TPK_JOIN = 4, TPK_END = 8 };
/* Enqueues these steps of a call, in this order.  `bases`: of the call's tensors, for MOVE; a host array. */
int tpk_call_run(const tpk_call* call, int32_t steps, const void* const* bases, int32_t num_bases, void* stream);

/* out = round(part[0] + part[1] + ... (+ bias)), fp32, in rank order, rounded once.  Part r is [rows, columns] of
 * `part_dtype` with row stride `strides[r]`; `out` of out_dtype (equal, or one of them is F32).  `parts` and `strides`
 * are host arrays.  With num_chunks > 0 rows of chunk k (chunk_begin in csrc/common/schedule.h) are summed once signal
 * k of every other rank is there; without, everything must be there. */
int tpk_reduce(const tpk_group* group, int32_t op, int32_t part_dtype, int32_t out_dtype, const void* const* parts,
               const int64_t* strides, const void* bias, void* out, int64_t out_stride, int64_t rows, int64_t columns,
               int32_t num_chunks, void* stream);

/* Calls in one kernel: every rank pushes what it has to its part of every slot, and finishes from its own slot.
 * `slots` is a host array: slot `slot` of every rank's symmetric buffer, of world_size * tpk_one_shot_slot_bytes(bytes of
 * the largest contribution) bytes at least.  `multicast` is the multicast address of those slots (sm_90 or later with
 * NVLS), or NULL: then, and for what is not aligned to 16 bytes, each peer is stored to.  Results are the same. */
typedef struct tpk_one_shot {
    int32_t op;
    int32_t slot;
    uint32_t fingerprint;
    void* const* slots;
    void* multicast;
} tpk_one_shot;
int64_t tpk_one_shot_slot_bytes(int64_t bytes);

/* out = round(x of rank 0 + ... (+ bias)) on every rank, bit for bit the same.  x and out are contiguous
 * [rows, columns] of at most 2^31 elements, may be equal. */
int tpk_all_reduce(const tpk_group* group, const tpk_one_shot* call, int32_t dtype, const void* x, const void* bias,
                   void* out, int64_t rows, int64_t columns, void* stream);
/* What follows that sum in a model, in the same kernel, equal on every rank if its inputs are:
 *     out = round(round(sum) + residual),  normed = round(out * scale * weight),  scale = 1 / sqrt(mean(out^2) + eps)
 * by rows; residual and normed are like out, weight is one row, scales has an fp32 per row. */
typedef struct tpk_norm {
    const void* residual;
    const void* weight;
    void* normed;
    float* scales;
    float eps;
} tpk_norm;
int tpk_all_reduce_norm(const tpk_group* group, const tpk_one_shot* call, int32_t dtype, const void* x,
                        const void* bias, const tpk_norm* norm, void* out, int64_t rows, int64_t columns, void* stream);
/* The same sum, with the same bits, of more data: each rank sums its share of it and sends that to all.  Slots are of
 * tpk_two_shot_slot_bytes(bytes of x, world_size) bytes in all. */
int64_t tpk_two_shot_slot_bytes(int64_t bytes, int32_t world_size);
int tpk_all_reduce_two_shot(const tpk_group* group, const tpk_one_shot* call, int32_t dtype, const void* x,
                            const void* bias, void* out, int64_t rows, int64_t columns, void* stream);
/* out = x of rank 0, then that of rank 1, and so on: counts[r] elements of `element_bytes` (2 or 4) each. */
int tpk_all_gather(const tpk_group* group, const tpk_one_shot* call, int32_t element_bytes, const void* x, void* out,
                   const int64_t* counts, void* stream);

#ifdef __cplusplus
}
#endif
