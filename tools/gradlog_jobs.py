"""Jobs of mixed precision in torch's own layouts: fp32 parameters and moments, gradients that are reduced in bf16."""

from __future__ import annotations

import torch
import torch.distributed as dist
from benchmarks.engines import GPT, Job, TorchJob, make_job

MIXED = ("ddp-mixed", "fsdp2-mixed")


class MixedJob(TorchJob):
    """DDP that reduces in bf16 (a communication hook), or FSDP2 that computes and reduces in bf16, around fp32."""

    def __init__(self, layout: str, params: float) -> None:
        torch.manual_seed(0)
        self.bare = GPT(params)
        Job.__init__(self, layout, self.bare.vocab)
        self.params = sum(p.numel() for p in self.bare.parameters())
        self.model = self._replicated() if layout == "ddp-mixed" else self._sharded()
        self.optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-4, weight_decay=0.1, foreach=True)
        self.engine = (self.model, self.optimizer)
        self.information = 12 * self.params + 4 * sum(1 for _ in self.bare.parameters())  # and a step counter each

    def _replicated(self) -> torch.nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        model = torch.nn.parallel.DistributedDataParallel(self.bare)
        # Under its own name torch refuses it without NCCL, which it works without.
        model.register_comm_hook(dist.group.WORLD, lambda group, bucket: bf16_compress_hook(group, bucket))
        return model

    def _sharded(self) -> torch.nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in self.bare.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(self.bare, mesh=mesh, mp_policy=policy)


def job_of(layout: str, params: float) -> Job:
    """Return a job in one of the benchmark's layouts in bf16, or in one of :data:`MIXED`. A collective."""
    return MixedJob(layout, params) if layout in MIXED else make_job(layout, params, "bf16")
