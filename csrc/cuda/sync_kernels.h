// Kernels of one warp that begin calls, signal and wait.
#pragma once

#include "cuda/protocol.h"

namespace tpk {

// Begins the next call: see tpk_begin.  Nobody looks at flags or raises them meanwhile: those who do so for the last
// call came before on this stream, or were joined to it, and those of this call come behind.
TPK_KERNEL begin_call(TPK_ARGUMENT Group group, int op, int slot, std::uint32_t fingerprint, std::uint32_t* flags,
                      int num_flags) {
    const Signal current = make_signal(epoch_of(group.state->current) + 1, fingerprint);
    if (any_of_block(has_failed(group))) return;
    arrive_of_block(group, current);
    for (int i = static_cast<int>(thread_index()); i < num_flags; i += static_cast<int>(num_threads())) flags[i] = 0;
    if (!wait_slot_of_block(group, current, slot, op) || thread_index() != 0) return;
    group.failure->call = epoch_of(current);
    group.state->raised = TPK_FLAG_RAISED;
    group.state->last_use[slot] = epoch_of(current);
    group.state->current = current;
}

// A call that is nothing but the meeting of all ranks.
TPK_KERNEL meet(TPK_ARGUMENT Group group, int op, std::uint32_t fingerprint) {
    const Signal current = make_signal(epoch_of(group.state->current) + 1, fingerprint);
    bool failed = has_failed(group);
    if (any_of_block(failed)) return;
    arrive_of_block(group, current);
    for (int peer = static_cast<int>(thread_index()); peer < group.world_size;
         peer += static_cast<int>(num_threads())) {
        const Signal* const word = group.pads[group.rank] + arrived_word(peer);
        if (!wait_word(group, word, epoch_of(current), current, {op, peer, -1})) failed = true;
    }
    if (!any_of_block(failed) && thread_index() == 0) group.state->current = current;
}

// What the stream did before this kernel is visible to whoever sees the signal.
TPK_KERNEL signal_chunk(TPK_ARGUMENT Group group, std::uint64_t targets, int chunk) {
    if (any_of_block(has_failed(group))) return;
    signal_chunk_of_block(group, group.state->current, targets, chunk);
}

TPK_KERNEL wait_chunk(TPK_ARGUMENT Group group, std::uint64_t sources, int chunk, int op) {
    if (any_of_block(has_failed(group))) return;
    wait_chunk_of_block(group, group.state->current, sources, chunk, op);
}

// The end of a call whose slots were read by copies: those that were joined to this stream.
TPK_KERNEL end_call(TPK_ARGUMENT Group group, int op) { check_peers_of_block(group, group.state->current, op); }

// Flags lie in this rank's own memory: copies tell a GEMM that a chunk has come, a GEMM tells copies that one may go.
// That of rank r is flags[r * stride].
TPK_KERNEL raise_flags(TPK_ARGUMENT Group group, std::uint32_t* flags, int stride, std::uint64_t ranks) {
    if (has_failed(group)) return;
    for (int rank = static_cast<int>(thread_index()); rank < kMaxRanks; rank += static_cast<int>(num_threads())) {
        if (ranks >> rank & 1) store_release_system(flags + rank * stride, group.state->raised);
    }
}

// See Relay.
TPK_KERNEL relay(TPK_ARGUMENT Group group, TPK_ARGUMENT Relay job) {
    if (any_of_block(has_failed(group))) return;
    const Signal current = group.state->current;
    if (job.signal_peers != 0) signal_chunk_of_block(group, current, job.signal_peers, job.signal_chunk);
    if (job.wait_peers != 0) wait_chunk_of_block(group, current, job.wait_peers, job.wait_chunk, job.op);
    for (int rank = static_cast<int>(thread_index()); rank < kMaxRanks; rank += static_cast<int>(num_threads())) {
        if ((job.wait_ranks >> rank & 1) == 0) continue;
        const std::uint32_t* const flag = job.flags + rank * job.flag_stride;
        wait_word(group, flag, group.state->raised, current, {job.op, group.rank, job.wait_chunk});
    }
}

}  // namespace tpk
