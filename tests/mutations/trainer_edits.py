"""Seeded faults of the integrations into trainers."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["TRAINERS"]

HF, HF_TESTS, INTEGRATIONS = "integrations/transformers", "tests/integrations/transformers", "tests/integrations"
TRAINER = f"{HF_TESTS}/test_trainer.py -k gpt2_of_prepare"
PLAN_RUNS = f"{HF_TESTS}/test_register.py -k plan_runs_an_op"
ADAPTERS = f"{HF_TESTS}/test_peft.py -k runs_our_ops"
SIZED = f"{HF_TESTS}/test_peft.py -k part_of_a_part --full"
MERGED = f"{HF_TESTS}/test_peft.py -k 4-2-False --full"
STYLES = f"{INTEGRATIONS}/styles/test_styles.py -k train_as_one_process"
MEGATRON = f"{INTEGRATIONS}/megatron/test_megatron.py"

TRAINERS = (
    # a packed name in a file, a rank that does not save, ranks with other batches
    Edit(
        "state/plain_state.py",
        "            state_dict = full_state_dict(self, rank=0)\n",
        "            state_dict = {name: gathered(one) for name, one in self.named_parameters()}\n",
        TRAINER,
    ),
    Edit(
        f"{HF}/snapshots.py",
        "        save_snapshot(given",
        "        if args.process_index == 0:\n            save_snapshot(given",
        TRAINER,
    ),
    Edit(f"{HF}/private_names.py", "    model._tp_size = tp_size\n", "    model._tp_size = 1\n", TRAINER),
    # register() without effect, a partial gradient of LoRA, adapters that cannot be merged
    Edit(
        f"{HF}/registered.py", "module.forward = _Forward(layer, mesh, what)", "_Forward(layer, mesh, what)", PLAN_RUNS
    ),
    Edit(f"{HF}/registered.py", "        module.forward = found\n", "        del found\n", PLAN_RUNS),
    Edit(
        f"{HF}/registered.py",
        "        y: Tensor = self.layer(x)\n",
        "        y: Any = self.layer(x) if self.layer.weight.shape[1] != 4 else x @ self.layer.weight.to_local().T\n",
        ADAPTERS,
    ),
    Edit(f"{HF}/registered.py", "            let_adapters_merge()\n", "            pass\n", ADAPTERS),
    # a bias added twice, a sum over the ranks that is left out
    Edit(
        "nn/row.py",
        "return matmul_all_reduce(x, weight, mesh, bias=bias,",
        "return (0 if bias is None else bias) + matmul_all_reduce(x, weight, mesh, bias=bias,",
        STYLES,
    ),
    Edit(
        "nn/row.py",
        "return matmul_all_reduce(x, weight, mesh, bias=bias, implementation=self.implementation)",
        "return nn.functional.linear(x, weight, bias)",
        STYLES,
    ),
    Edit(
        "integrations/megatron.py",
        "return y if self.bias is None else y + self.bias, None",
        "return y if self.bias is None else y + 2 * self.bias, None",
        f"{MEGATRON} -k every_option",
    ),
    # main_grad by our GEMM and by Megatron's hook
    Edit(
        "integrations/megatron.py",
        "return weight if self.gradient_accumulation_fusion else weight.view_as(weight)",
        "return weight",
        f"{MEGATRON} -k micro_batches",
    ),
    # a loss whose bits are not Megatron's
    Edit(
        "integrations/megatron.py",
        "losses: Tensor = (z.log() - predicted)",
        "losses: Tensor = (z.reciprocal().log().neg() - predicted)",
        f"{MEGATRON} -k the_loss_has",
    ),
    Edit(
        "integrations/megatron.py",
        "shifted.exp_().sum(-1)",
        "shifted.exp_().flip(-1).sum(-1)",
        f"{MEGATRON} -k the_loss_has",
    ),
    # factories that say nothing of what is left
    Edit(
        "integrations/torchtitan.py",
        "    if left and strict:\n",
        "    if left and strict and not ours:\n",
        f"{INTEGRATIONS}/torchtitan/test_torchtitan.py -k named_or_refused",
    ),
    Edit(
        "integrations/torchtitan.py",
        "        if _is_cut(node) and not path",
        "        if not _is_cut(node) and not path",
        f"{INTEGRATIONS}/torchtitan/test_torchtitan.py -k named_or_refused",
    ),
    # factories that leave torchtitan's layer, a model without values that is not loaded
    Edit(
        "integrations/torchtitan.py",
        "new = derive(cfg, GatheringFeedForward.Config)",
        "new = derive(cfg, FeedForward.Config)",
        f"{INTEGRATIONS}/torchtitan/test_torchtitan.py -k as_exact",
    ),
    Edit(
        "integrations/torchtitan.py",
        "output = derive(cfg.wo, ScatteringLinear.Config)",
        "output = derive(cfg.wo, Linear.Config)",
        f"{INTEGRATIONS}/torchtitan/test_torchtitan.py -k as_exact",
    ),
    # blocks that leave DTensors to torchtitan and say nothing, ranks that share no model, what one axis holds
    # written by all of the other, adapters that PEFT sizes wrongly, merged models that no hook gathers
    Edit(
        "integrations/torchtitan.py",
        "            mesh = x.device_mesh\n",
        "            return None\n            mesh = x.device_mesh\n",
        f"{INTEGRATIONS}/torchtitan/test_trainer.py -k as_exact",
    ),
    Edit(
        "integrations/accelerate.py",
        "if any(mesh.size() != dist.get_world_size() for mesh in meshes):",
        "if not meshes:",
        f"{HF_TESTS}/test_accelerate.py -k refused_before",
    ),
    Edit(
        "state/collective_errors.py",
        "for group in self._groups if not on_mesh",
        "for group in self._groups[:0] if not on_mesh",
        "tests/state/test_snapshot_tensors.py -k one_axis",
    ),
    Edit(f"{HF}/registered.py", "            check_half(name, module, mesh)\n", "            ...\n", SIZED),
    Edit(f"{HF}/prepared.py", "inner if only_inner else model, mesh", "model, mesh", MERGED),
    Edit(
        "integrations/lightning.py",
        "            load_pretrained(model, checkpoint)\n",
        "            pass\n",
        f"{INTEGRATIONS}/lightning/test_lightning.py -k without_values",
    ),
    Edit(
        "integrations/accelerate.py",
        "            load_optimizer_state_dict(model, one, given)\n",
        "            pass\n",
        f"{HF_TESTS}/test_accelerate.py -k prepared_loop",
    ),
    Edit(
        "integrations/accelerate.py",
        "distributed_type).NO\n",
        "distributed_type).MULTI_CPU\n",
        f"{HF_TESTS}/test_accelerate.py -k prepared_loop",
    ),
    Edit(
        f"{HF}/experts.py",
        "return _cut_otherwise(module, layout) or ",
        "return None or ",
        f"{HF_TESTS}/test_register.py -k named_with_the_reason",
    ),
)
