"""Seeded faults of every floor, as edits of one line, and the tests of the quick run that have to notice each."""

from __future__ import annotations

from tests.mutations.argument_edits import ARGUMENT_EDITS
from tests.mutations.block_edits import BLOCKS
from tests.mutations.condition_edits import CONDITIONS
from tests.mutations.convolution_edits import CONVOLUTIONS
from tests.mutations.edit import Edit
from tests.mutations.fp8_edits import FP8
from tests.mutations.kept_edits import KEPT_EDITS
from tests.mutations.norm_edits import NORMS
from tests.mutations.picking_edits import PICKING_EDITS
from tests.mutations.planner_edits import PLANNER
from tests.mutations.product_edits import ARGUMENTS, OWN_PRODUCTS, RETURNED
from tests.mutations.same_bits_edits import SAME_BITS
from tests.mutations.trainer_edits import TRAINERS
from tests.mutations.value_edits import VALUES
from tests.mutations.window_edits import WINDOWS

__all__ = ["EDITS", "Edit"]

PARTITION, CONTRACT = "tests/test_partition.py", "tests/backends/test_contract.py"
CHUNKED, UNFUSED = f"{CONTRACT} -k chunked", f"{CONTRACT} -k unfused"
SHARED = f"{CONTRACT} -k shared_memory"
EXCHANGE, ROWS = "backends/point_to_point/exchange.py", "backends/row_gemms.py"
POINT = "backends/point_to_point/chunked.py"
VOCABULARY, MASTERS = "tests/nn/test_vocabulary.py", "tests/optim/test_master_weights.py"
LINEAR, ATTENTION = "tests/nn/test_linear.py", "tests/nn/test_attention.py"
VERIFY = "tests/verification/test_verification.py"
CHECKPOINT = "tests/state/test_checkpoint.py"
SHARED_FILE, KERNELS = "backends/shared_memory/implementations.py", "tests/kernels/test_interpreted.py"
LAUNCHES, GROUPED_KERNEL = "tests/kernels/test_known_launches.py", "tests/kernels/test_grouped.py"
SUMS = "tests/gemm/test_token_sums.py"
WIDENED, WIDENS = "gemm/widened.py", "tests/backends/test_widened.py"
IDENTITY, LIVENESS = "tests/comm/test_job_identity.py", "tests/comm/test_liveness.py"
INTERRUPTS, MODES = "tests/comm/test_interrupts.py", "tests/ops/test_autograd_modes.py"
SNAPSHOT_TENSORS = "tests/state/test_snapshot_tensors.py"
FAILURES, AGREEMENT = "tests/comm/test_failures.py", "tests/comm/test_agreement.py"

EDITS = (
    # partition
    Edit("partition.py", "base + 1 if i < rest else base", "base + 1 if i <= rest else base", PARTITION),
    Edit("partition.py", "size = -(-total // n)", "size = total // n", PARTITION),
    Edit("partition.py", "(size - size // 2, size // 2)", "(size // 2, size - size // 2)", PARTITION),
    Edit("partition.py", "accumulate(sizes, initial=0))[:-1]", "accumulate(sizes, initial=0))[1:]", PARTITION),
    Edit("partition.py", "(rank + step) % world_size", "(rank + step + 1) % world_size", PARTITION),
    Edit("partition.py", "dim == len(shape) - 1", "dim == len(shape) - 2", PARTITION),
    Edit("partition.py", "prod(shape[dim + 1 : -1])", "prod(shape[dim:-1])", PARTITION),
    Edit("partition.py", "outer * stride + shift + low", "outer * stride + low", PARTITION),
    Edit("partition.py", "(stop - 1) // block + 1", "stop // block", PARTITION),
    Edit("partition.py", "min(MAX_CHUNKS, by_rows, by_bytes)", "min(MAX_CHUNKS, by_rows)", PARTITION),
    # trust
    Edit(
        "comm/job_identity.py",
        "if not hmac.compare_digest(expected, stored):",
        "if not code:",
        f"{IDENTITY} -k counts_in_its_place",
    ),
    Edit(
        "config.py",
        "status.st_uid != os.getuid() or status.st_mode & 0o077",
        "status.st_uid != os.getuid()",
        f"{IDENTITY} -k only_its_owner",
    ),
    Edit("comm/liveness.py", 'return os.readlink(_PROC / "self") == str(os.getpid())', "return True", LIVENESS),
    Edit(
        "comm/liveness.py",
        "return _shows_all() and not _is_listed(self.pid)",
        "return not _is_listed(self.pid)",
        LIVENESS,
    ),
    Edit(
        "comm/interrupts.py",
        "if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:",
        "if True:",
        f"{INTERRUPTS} -k ctrl_c",
    ),
    Edit("comm/monitor.py", "    _end_calls_of_daemons()\n", "", f"{INTERRUPTS} -k daemon"),
    Edit(
        "backends/shared_memory/segments.py",
        "if limit != resource.RLIM_INFINITY and limit < needed:",
        "if limit == needed:",
        "tests/backends/test_shared_memory.py -k limit_on",
    ),
    Edit(
        "ops/plain_calls.py",
        "any(cast(Tensor, tensor).is_neg() for",
        "any(cast(Tensor, tensor).is_conj() for",
        f"{MODES} -k negative_bit",
    ),
    Edit(
        "ops/registration.py",
        "if isinstance(value, Tensor) and forward_ad",
        "if value is None and forward_ad",
        f"{MODES} -k tangent",
    ),
    Edit(
        "ops/matmul_all_reduce.py",
        "bias=bias is not None,",
        "bias=False,",
        "tests/ops/test_bad_input.py -k bias_that_only",
    ),
    Edit(
        "state/safetensors_files.py",
        "                heads.update(piece)\n",
        "                pass\n",
        "tests/state/test_files.py -k samples",
    ),
    Edit("state/snapshot_tensors.py", "if writer == everyone.rank:", "if True:", SNAPSHOT_TENSORS),
    Edit(
        "state/snapshot_tensors.py",
        "start - offset for start, offset in zip(low, chunk.box",
        "start for start, offset in zip(low, chunk.box",
        f"{SNAPSHOT_TENSORS} -k boxes",
    ),
    # messages between ranks
    Edit("comm/transport.py", "(signature_id % MAX_SIGNATURES) << 18", "0 << 18", f"{FAILURES} {AGREEMENT}"),
    Edit("comm/transport.py", "start([tensor], peer, tag + chunk)", "start([tensor], peer, tag)", CHUNKED),
    Edit("comm/transport.py", "self.target.copy_(self.tensor)", "pass", "tests/comm/test_transport_on_cuda.py"),
    Edit(EXCHANGE, "low, high = self.rows(mine, chunk)", "low, high = self.rows(mine, 0)", CHUNKED),
    Edit(EXCHANGE, "for rank in range(self.group.size):", "for rank in reversed(range(self.group.size)):", UNFUSED),
    Edit(
        EXCHANGE,
        "            if transfer is not None:\n                transfer.wait()\n            parts",
        "            parts",
        "tests/testing/test_faults_in_transport.py tests/backends/test_contract.py -k chunked",
    ),
    # sums, and where rows go
    Edit(
        ROWS,
        "total = parts[0][start : start + step].to(wide, copy=True)",
        "total = parts[0][start : start + step].clone()",
        UNFUSED,
    ),
    Edit(ROWS, "for part in parts[1:]:", "for part in parts[2:]:", UNFUSED),
    Edit(ROWS, "total += bias if bias.dim() == 1 else", "total += 2 * bias if bias.dim() == 1 else", UNFUSED),
    Edit(ROWS, "epilogue.fill(part, segment.dst)", "epilogue.fill(part, segment.start)", CHUNKED),
    Edit(ROWS, "        bias = out\n", "        bias = None\n", "tests/ops/test_gradients.py"),
    Edit(
        ROWS,
        "gate_forward(call.activation, gate, up, out=outs[0])",
        "gate_forward(call.activation, up, gate, out=outs[0])",
        "tests/ops/test_gated.py",
    ),
    Edit(
        ROWS,
        "shift = sum(layout.sizes[:rank]) * layout.inner",
        "shift = sum(layout.sizes[: rank + 1]) * layout.inner",
        "tests/ops/test_values.py",
    ),
    Edit(POINT, "if arrived == group.size - 1:", "if arrived == group.size - 2:", "tests/ops/test_values.py"),
    Edit(
        POINT,
        "reduce_rows(outgoing.parts(chunk, own), own[start:stop], bias_of(call.bias, start, stop))",
        "reduce_rows(outgoing.parts(chunk, own), own[start:stop])",
        CHUNKED,
    ),
    Edit(POINT, "places[peer] = starts[peer] + low, starts[peer] + high", "places[peer] = low, high", CHUNKED),
    Edit("backends/point_to_point/unfused.py", "start = sum(layout.sizes[:rank]) * layout.inner", "start = 0", UNFUSED),
    # who is to blame
    Edit("comm/monitor.py", "presence.tell(self.group, verdict, self.store)", "pass", "tests/comm/test_works.py"),
    Edit(
        "comm/monitor.py",
        "        transport.abort(self.group)\n\n    def _compare_order",
        "\n    def _compare_order",
        FAILURES,
    ),
    Edit(
        "comm/monitor.py",
        "age > self.group.timeout - _margin(self.group)",
        "age > 10 * self.group.timeout",
        "tests/comm/test_works.py",
    ),
    Edit(
        "ops/agreed_call.py",
        "        if len(set(values)) > 1:\n",
        "        if len(set(values)) > 2:\n",
        f"{AGREEMENT} {FAILURES}",
    ),
    Edit(
        "ops/agreed_call.py",
        "        group.calls = call + 1\n        if group.trail is not None:\n            number = ",
        "        group.calls = call\n        if group.trail is not None:\n            number = ",
        f"{FAILURES} {AGREEMENT}",
    ),
    # experts
    Edit(
        "backends/grouped_gemms.py",
        "total.index_add_(0, call.rows.tokens[rows] - start, weighted)",
        "total.index_copy_(0, call.rows.tokens[rows] - start, weighted)",
        f"{SUMS} -k partial",
    ),
    Edit("backends/grouped_gemms.py", "for low in range(0, columns, step)]", "for low in [0]]", f"{SUMS} -k partial"),
    Edit("gemm/token_sums.py", "rest = rest - part", "rest = rest - rest", SUMS),
    Edit("gemm/token_sums.py", ".cumsum(0), (1, 0)) * parts", ".cumsum(0), (1, 0))", SUMS),
    Edit("gemm/few_rows.py", "bias_at + expert * bias_step", "bias_at", "tests/ops/test_grouped.py -k compiled"),
    Edit(
        "gemm/grouped.py",
        "weighted = (h[low:high] * weights[low:high, None]).to(h.dtype)",
        "weighted = h[low:high]",
        "tests/ops/test_grouped.py",
    ),
    Edit("gemm/few_rows.py", "first * x_step * itemsize, x_step", "0, x_step", "tests/ops/test_grouped.py -k compiled"),
    Edit(
        "ops/expert_blocks.py",
        "if group.size > 1 else dots",
        "if group.size > 2 else dots",
        "tests/ops/test_grouped.py",
    ),
    Edit(
        "gemm/dealt.py",
        "owners = torch.bucketize(experts, ends, right=True)",
        "owners = torch.bucketize(experts, ends)",
        "tests/ops/test_dealt.py",
    ),
    Edit(
        "backends/dealt_sums.py",
        "total.index_add_(0, places, part.to(total.dtype))",
        "total.index_copy_(0, places, part.to(total.dtype))",
        "tests/ops/test_dealt.py",
    ),
    Edit(
        "ops/agreed_call.py",
        "identity ^= compared.digest % transport.MAX_SIGNATURES",
        "identity ^= 0",
        "tests/ops/test_grouped.py -k told",
    ),
    # choice
    Edit(POINT, "MANY_ROWS = 1.0, 2.5, 256", "MANY_ROWS = 1.0, 1.0, 256", "tests/test_dispatch.py"),
    Edit(
        "dispatch.py",
        "able = sorted(able, key=lambda offer: estimates[offer.name])",
        "able = sorted(able, key=lambda offer: -estimates[offer.name])",
        "tests/test_dispatch.py",
    ),
    Edit(
        "dispatch.py",
        "return calls * (one + matrices * self.gemm_overhead_us)",
        "return one + matrices * self.gemm_overhead_us",
        "tests/test_dispatch.py",
    ),
    # ops and their gradients
    Edit(
        "ops/matmul_reduce_scatter.py",
        "results.append(whole.sum(0))",
        "results.append(dy2d.sum(0))",
        "tests/ops/test_gradients.py",
    ),
    Edit(
        "ops/matmul_reduce_scatter.py",
        "        low, high = layout.columns(group.rank)\n        bias = bias[low:high]",
        "        low, high = layout.columns(0)\n        bias = bias[low:high]",
        "tests/ops/test_values.py",
    ),
    Edit(
        "ops/gradients.py",
        "results.append(dy2d.sum(0))",
        "results.append(dy2d.mean(0))",
        "tests/ops/test_gradients.py tests/ops/test_world_one.py",
    ),
    Edit(
        "ops/residual_norm.py",
        "eps = torch.finfo(residual.dtype).eps",
        "eps = torch.finfo(torch.float32).eps",
        "tests/ops/test_residual_norm.py",
    ),
    Edit("ops/registration.py", "arg.dtype != torch.float64 and ", "", "tests/ops/test_autograd_modes.py"),
    # modules
    Edit(
        "nn/cross_entropy.py",
        "return column.clamp(0, columns - 1).unsqueeze(-1), (column >= 0) & (column < columns)",
        "return column.clamp(0, columns - 1).unsqueeze(-1), (column >= 0) & (column <= columns)",
        VOCABULARY,
    ),
    Edit(
        "nn/cross_entropy.py",
        "losses += settings.z_loss * (largest + log_z).square()",
        "losses += settings.z_loss * log_z.square()",
        VOCABULARY,
    ),
    Edit("nn/cross_entropy.py", "total / (target != ignore_index).sum()", "total / target.numel()", VOCABULARY),
    Edit("nn/cross_entropy.py", "largest = table[..., 0].amax(0)", "largest = table[0, ..., 0]", VOCABULARY),
    Edit(
        "nn/norm.py",
        "    packed = copy_to_group(torch.stack(used), mesh)\n",
        "    packed = torch.stack(used)\n",
        "tests/nn/test_blocks.py tests/nn/test_as_modules.py",
    ),
    Edit(
        "nn/random.py",
        "seed = _mix(shared, pg.rank())",
        "seed = _mix(shared, 0)",
        "tests/nn/test_blocks.py tests/nn/test_as_modules.py tests/nn/test_random_on_gpu.py",
    ),
    Edit(
        "nn/parallel_linear.py",
        "chunk_sizes(total, self.mesh.size(), self.unit)",
        "chunk_sizes(total, self.mesh.size())",
        f"{LINEAR} {ATTENTION}",
    ),
    Edit(
        "nn/row.py",
        "x = shard(x, mesh, dim=-1, shard_sizes=self.shard_sizes) if mesh.size() > 1 else x",
        "x = x[..., : weight.shape[1]]",
        LINEAR,
    ),
    Edit("nn/packed.py", "start += size", "start = size", "tests/sharding/test_apply.py tests/nn/test_same_weights.py"),
    # optimizers
    Edit(
        "optim/master_weights.py", "grad = parameter.grad if grad is None else grad", "grad = parameter.grad", MASTERS
    ),
    Edit(
        "optim/master_weights.py",
        "sizes = [sum(counts[i : i + len(members)]) for i in range(0, len(counts), len(members))]",
        "sizes = [sum(counts) // group.size()] * group.size()",
        MASTERS,
    ),
    Edit("optim/master_weights.py", "_local(entry.master).copy_(_local(masters[key]))", "pass", MASTERS),
    # state
    Edit(
        "state/staging.py",
        "copy_(target.part.placed(target.staged))",
        "copy_(target.part.placed(target.staged).flip(0))",
        CHECKPOINT,
    ),
    Edit("state/clipping.py", "    for axis in dims:\n", "    for axis in dims[1:]:\n", CHECKPOINT),
    Edit("state/clipping.py", "(max_norm / (norm + 1e-6)).clamp(max=1.0)", "(max_norm / (norm + 1e-6))", CHECKPOINT),
    Edit(
        "state/clipping.py",
        "    if not dims or not anywhere():\n",
        "    if dims or not anywhere():\n",
        "tests/sharding/test_same_bits_replicas.py -k two_micro",
    ),
    Edit("state/huggingface_export.py", "if files[-1] and size + _bytes(original) > limit:", "if False:", CHECKPOINT),
    # what parallelize does
    Edit(
        "sharding/sequence_parallel.py",
        "stack.fork.enter(x.device, stack.mesh.get_local_rank())",
        "stack.fork.enter(x.device, 0)",
        "tests/models/test_training.py",
    ),
    Edit(
        "sharding/sequence_parallel.py",
        "return chunk_sizes(self.shape[1], self.mesh.size())",
        "return array_split_sizes(self.shape[1], self.mesh.size())",
        "tests/models/test_models.py",
    ),
    Edit("sharding/apply.py", "summed = style.sequence_parallel", "summed = False", "tests/models/test_models.py"),
    Edit(
        "sharding/apply.py",
        "call_cut_layers(model, [old for old, _ in swapped])",
        "pass",
        "tests/sharding/test_torch_encoder.py",
    ),
    Edit(
        "sharding/apply.py",
        "weights = compare_models(model, mesh, init_weights, check=check_plain)",
        "weights = compare_models(model, tp, init_weights, check=check_plain)",
        "tests/sharding/test_replicas.py",
    ),
    # what verify finds
    Edit(
        "verification/bounds.py",
        'ratio.nan_to_num(nan=float("inf"), posinf=float("inf"))',
        "ratio.nan_to_num(nan=0.0)",
        "tests/verification/test_bounds.py",
    ),
    Edit(
        "verification/bounds.py",
        "error = (actual.detach().double() - exact).abs()",
        "error = (actual.detach().double() - exact).abs() / 100",
        VERIFY,
    ),
    # memory that ranks of a host share
    Edit(
        SHARED_FILE,
        "channel.wait(producer, (rank - producer) % size)",
        "channel.wait(producer, 1)",
        "tests/backends/test_shared_memory.py",
    ),
    Edit(SHARED_FILE, "parts[rank] = own.data_ptr()", "pass", SHARED),
    Edit(SHARED_FILE, "(start + low * stride) * itemsize", "start * itemsize", "tests/ops/test_residual_norm.py"),
    Edit(
        SHARED_FILE,
        "first = start * out.shape[1] * out.element_size()",
        "first = 0",
        f"{SHARED} tests/backends/test_many_ranks.py",
    ),
    Edit(
        SHARED_FILE,
        'return all(record.facts["wins"] for record in records)',
        'return records[0].facts["wins"]',
        "tests/backends/test_few_rows.py",
    ),
    # bf16 in fp32
    Edit(WIDENED, "out=part)", "out=part)\n            part.copy_(part.to(out.dtype))", WIDENS),
    Edit(WIDENED, "max(found) if", "min(found) if", WIDENS),
    Edit(WIDENED, "bias[low:high, left:right]", "bias[:high - low, left:right]", WIDENS),
    Edit("ops/agreed_call.py", 'record.facts["widens"] for record in records', 'records[0].facts["widens"]', WIDENS),
    Edit("ops/main_grad.py", "widened.matmul(dz.t(), x)", "torch.mm(dz.t(), x)", WIDENS),
    # kernels, interpreted
    Edit("kernels/matmul_reduce_scatter.py", "!= 0:\n        announce(", "== 0:\n        announce(", KERNELS),
    Edit("kernels/matmul_reduce_scatter.py", "first_column + half * (BLOCK_N // 2)", "first_column", KERNELS),
    # launches that are known
    Edit("kernels/grouped_matmul.py", "(slot != ready)", "(slot == -5)", GROUPED_KERNEL),
    Edit("kernels/grouped_matmul.py", "+ row_tile * FIELDS + 7", "+ row_tile * FIELDS + 3", GROUPED_KERNEL),
    Edit("kernels/grouped_matmul.py", "product = product *", "product = product + 0 *", GROUPED_KERNEL),
    Edit("kernels/schedule.py", "counts.sum(1)[turn]", "counts.amax(1)[turn]", GROUPED_KERNEL),
    Edit(
        "gemm/dealt.py",
        "(self.num_tokens, self.top_k), -1)",
        "(self.num_tokens, self.top_k), 0)",
        f"{GROUPED_KERNEL} -k listed",
    ),
    Edit(
        "backends/symmetric/dealt.py",
        "if rank != owner)",
        "if rank == owner)",
        "tests/backends/test_symmetric_grouped.py -k lie",
    ),
    Edit("kernels/known_launches.py", "base=tensor", "base=like.base", LAUNCHES),
    Edit("kernels/known_launches.py", "else None if like is None", "else tensor if like is None", LAUNCHES),
    Edit("backends/symmetric/kernel_launches.py", ", t.data_ptr() % 16)", ")", LAUNCHES),
    # local ranks
    Edit(
        "launching/rank_process.py",
        '"LOCAL_RANK": str(rank)',
        '"LOCAL_RANK": str(0)',
        "tests/launching/test_local_ranks.py",
    ),
    *BLOCKS,
    *CONDITIONS,
    *CONVOLUTIONS,
    *FP8,
    *PLANNER,
    *SAME_BITS,
    *TRAINERS,
    *OWN_PRODUCTS,
    *RETURNED,
    *ARGUMENTS,
    *VALUES,
    *NORMS,
    *WINDOWS,
    *KEPT_EDITS,
    *ARGUMENT_EDITS,
    *PICKING_EDITS,
)
